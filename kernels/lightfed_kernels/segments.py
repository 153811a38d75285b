"""The positions of a row's tensors, for operations that treat each tensor separately.

One launch covers all tensors. The work is cut into tiles of at most TILE elements, none of which
has elements of two tensors.
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
        layout: The layout of the tensors.
        bounds: (T, 2) int64 on the CPU: the offset and the number of elements of every tensor.
        tiles: (N, 4) int64 on the CPU, in the order of the elements: the tensor of a tile, its
            first word in the row, its number of elements, and the first tile of the same tensor.
        live: (W,) int32 on the CPU: the packed mask of the elements that are not padding.
    """

    layout: Layout
    bounds: Tensor
    tiles: Tensor
    live: Tensor
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, layout: Layout, *, device: torch.device | str = "cpu") -> "Segments":
        """Make the tables for rows of a layout.

        Args:
            layout: The layout.
            device: A device to which they are copied at once; others get a copy at their first use.

        Raises:
            ValueError: The tensors are not placed as Layout.build places them.
        """
        if layout != Layout.build((entry.name, entry.shape) for entry in layout):
            raise ValueError(
                "layout: its tensors are not back to back, as Layout.build places them"
            )
        pairs = [(entry.offset, entry.numel) for entry in layout]
        bounds = np.array(pairs, np.int64).reshape(-1, 2)
        live = np.packbits(layout.live(), bitorder="little").view(np.int32)
        segments = cls(
            layout=layout,
            bounds=torch.from_numpy(bounds),
            tiles=torch.from_numpy(_tiles(bounds)),
            live=torch.from_numpy(live),
        )
        # A device without a number, such as "cuda", is the current one.
        segments.tiles_on(torch.empty(0, device=device).device)
        return segments

    def __len__(self) -> int:
        return self.bounds.shape[0]

    @property
    def size(self) -> int:
        """The number of elements of a row, padding included."""
        return self.layout.size

    def tiles_on(self, device: torch.device) -> Tensor:
        """Return the tiles on a device."""
        return self._on(device)[0]

    def live_on(self, device: torch.device) -> Tensor:
        """Return the live words on a device."""
        return self._on(device)[1]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tiles and the live words on a device, where they are copied once."""
        if device not in self._copies:
            self._copies[device] = (self.tiles.to(device), self.live.to(device))
        return self._copies[device]


def count_per_tensor(words: Tensor, segments: Segments) -> Tensor:
    """Return how many bits of every tensor are 1, as (.., T) of int64.

    It can be captured in a CUDA graph after a first call on the device, which copies the tables.

    Args:
        words: (.., W) int32, packed masks.
        segments: The tensors of the row.

    Raises:
        ValueError: A bit in padding is 1; on a GPU found only under LIGHTFED_KERNELS_CHECK=1.
    """
    _rows.check_words("words", words, size=segments.size)
    shape = (*words.shape[:-1], len(segments))
    counts = torch.empty(shape, dtype=torch.int64, device=words.device)
    _count_per_tensor(counts, words, segments.bounds, segments.tiles_on(words.device))
    return counts


@torch.library.custom_op("lightfed::count_per_tensor", mutates_args=("counts",))
def _count_per_tensor(counts: Tensor, words: Tensor, bounds: Tensor, tiles: Tensor) -> None:
    """Write the counts, (.., T) int64, on the backend of the tensors."""
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
    """Check one packed mask of a row of these segments."""
    _rows.check_single(name, words)
    _rows.check_words(name, words, size=segments.size)


def check_padding(name: str, words: Tensor, bounds: Tensor) -> None:
    """Refuse masks with a 1 in padding; only the last word of a tensor has padding.

    On a GPU this would wait for the device, and is done only under LIGHTFED_KERNELS_CHECK=1.

    Args:
        name: The name of the argument, for errors.
        words: (.., W) int32.
        bounds: (T, 2), as of Segments.
    """
    if words.is_cuda and not _rows.checking():
        return

    # The ends of the tensors, as far as they are within a word.
    ends = bounds.sum(1).numpy()
    ends = ends[ends % ALIGNMENT != 0]
    last_words = words[..., torch.from_numpy(ends // ALIGNMENT).to(words.device)].cpu().numpy()
    in_padding = last_words & (np.int32(-1) << (ends % ALIGNMENT).astype(np.int32))
    if not in_padding.any():
        return

    bits = np.unpackbits(in_padding.view(np.uint8), bitorder="little").reshape(-1, ALIGNMENT)
    line, bit = np.argwhere(bits)[0]
    end = ends[line % len(ends)]
    raise ValueError(
        f"{name}: {bits.sum()} bits are set in padding, the first at element "
        f"{end // ALIGNMENT * ALIGNMENT + bit}; masks are 0 where a row has padding"
    )


def _tiles(bounds: np.ndarray, size: int = TILE) -> np.ndarray:
    """Cut tensors into tiles.

    Args:
        bounds: (T, 2), as of Segments.
        size: The most elements of a tile.

    Returns:
        (N, 4) int64, as of Segments.
    """
    tiles_of_tensor = -(-bounds[:, 1] // size)
    tensor = np.repeat(np.arange(len(bounds)), tiles_of_tensor)
    first_tile = (np.cumsum(tiles_of_tensor) - tiles_of_tensor)[tensor]
    # The elements of the same tensor in the tiles before.
    before = (np.arange(len(tensor)) - first_tile) * size

    offset, numel = bounds[tensor].T
    first_word = (offset + before) // ALIGNMENT
    elements = np.minimum(numel - before, size)
    return np.stack([tensor, first_word, elements, first_tile], 1).astype(np.int64)
