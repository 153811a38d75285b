"""The positions of a row's tensors, for operations that treat each tensor separately.

One launch covers all tensors: the work is cut into tiles of at most TILE elements, none of which
straddles two tensors.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels.layout import ALIGNMENT, TILE, Layout, word_bounds
from lightfed_kernels.masks import popcount


@dataclass(frozen=True, eq=False)
class Segments:
    """The tensors of a layout as tables.

    Attributes:
        layout: of the tensors.
        bounds: (T, 2) int64 on the CPU: offset and elements of every tensor.
        tiles: (N, 4) int64 on the CPU, in the order of the elements: the tensor, its first word of
            the row, its elements, and the first tile of the same tensor.
        live: (W,) int32 on the CPU: packed mask of the elements that are not padding.
    """

    layout: Layout
    bounds: Tensor
    tiles: Tensor
    live: Tensor
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, layout: Layout, *, device: torch.device | str = "cpu") -> "Segments":
        """Tables for rows of this layout; other devices than `device` get theirs at first use.

        Raises:
            ValueError: the tensors are not placed as by Layout.build.
        """
        if layout != Layout.build((entry.name, entry.shape) for entry in layout):
            raise ValueError(
                "layout: its tensors are not back to back, as Layout.build places them"
            )
        pairs = [(entry.offset, entry.numel) for entry in layout]
        bounds = np.array(pairs, np.int64).reshape(-1, 2)
        segments = cls(
            layout,
            torch.from_numpy(bounds),
            torch.from_numpy(_tiles(bounds)),
            torch.from_numpy(np.packbits(layout.live(), bitorder="little").view(np.int32)),
        )
        segments.tiles_on(torch.empty(0, device=device).device)
        return segments

    def __len__(self) -> int:
        return self.bounds.shape[0]

    @property
    def size(self) -> int:
        """Elements of a row, padding included."""
        return self.layout.size

    def tiles_on(self, device: torch.device) -> Tensor:
        """The tiles, on this device."""
        return self._on(device)[0]

    def live_on(self, device: torch.device) -> Tensor:
        """The live words, on this device."""
        return self._on(device)[1]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._copies:
            self._copies[device] = (self.tiles.to(device), self.live.to(device))
        return self._copies[device]


def count_per_tensor(words: Tensor, segments: Segments) -> Tensor:
    """(.., W) packed masks -> (.., T) int64: how many bits of every tensor are 1.

    Can be captured in a CUDA graph after a first call on the device, which copies the tables.

    Raises:
        ValueError: a bit in padding is 1; on a GPU only under LIGHTFED_KERNELS_CHECK=1.
    """
    _rows.check_words("words", words, size=segments.size)
    shape = (*words.shape[:-1], len(segments))
    counts = torch.empty(shape, dtype=torch.int64, device=words.device)
    _count_per_tensor(counts, words, segments.bounds, segments.tiles_on(words.device))
    return counts


@torch.library.custom_op("lightfed::count_per_tensor", mutates_args=("counts",))
def _count_per_tensor(counts: Tensor, words: Tensor, bounds: Tensor, tiles: Tensor) -> None:
    check_padding("words", words, bounds)
    if words.numel() == 0:
        counts.zero_()
    elif _rows.backend(counts, words) == "triton":
        from lightfed_kernels.gpu.select import launch_count

        launch_count(counts, words, tiles)
    else:
        for tensor, (first, last) in enumerate(word_bounds(bounds)):
            counts[..., tensor] = popcount(words[..., first:last])


_count_per_tensor.register_fake(lambda *arguments: None)


def check_mask(name: str, words: Tensor, segments: Segments) -> None:
    """One packed mask of a row of these segments."""
    _rows.check_single(name, words)
    _rows.check_words(name, words, size=segments.size)


def check_padding(name: str, words: Tensor, bounds: Tensor) -> None:
    """Check that no padding bit is 1; only the last word of a tensor has any.

    CUDA tensors are checked only under LIGHTFED_KERNELS_CHECK=1, because that waits for the device.
    """
    if words.is_cuda and not _rows.checking():
        return
    ends = bounds.sum(1).numpy()
    ends = ends[ends % ALIGNMENT != 0]
    last = words[..., torch.from_numpy(ends // ALIGNMENT).to(words.device)].cpu().numpy()
    stray = last & (np.int32(-1) << (ends % ALIGNMENT).astype(np.int32))
    if not stray.any():
        return
    bits = np.unpackbits(stray.view(np.uint8), bitorder="little").reshape(-1, ALIGNMENT)
    tail, bit = np.argwhere(bits)[0]
    tail %= len(ends)
    raise ValueError(
        f"{name}: {bits.sum()} bits are set in padding, the first at element "
        f"{ends[tail] // ALIGNMENT * ALIGNMENT + bit}; masks are 0 where a row has padding"
    )


def _tiles(bounds: np.ndarray, size: int = TILE) -> np.ndarray:
    """(N, 4): the tensor, first word, elements, first tile of the tensor."""
    per_tensor = -(-bounds[:, 1] // size)
    tensor = np.repeat(np.arange(len(bounds)), per_tensor)
    first = (np.cumsum(per_tensor) - per_tensor)[tensor]
    done = (np.arange(len(tensor)) - first) * size
    offset, numel = bounds[tensor].T
    elements = np.minimum(numel - done, size)
    return np.stack([tensor, (offset + done) // ALIGNMENT, elements, first], 1).astype(np.int64)
