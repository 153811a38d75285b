"""Input sets: seeded rows and masks, zero in padding, and the same as named tensors."""

import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightfed_kernels.bench.case import Case
from lightfed_kernels.bench.models import Model
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import pack_mask, unpack_mask

# model, clients, dtype, device -> cases
Build = Callable[[Model, int, torch.dtype, torch.device], list[Case]]

# What a sum of a few rows may lose, rounded once (ours) or at every addition (a rival's, in the
# dtype of the rows).
# The interpreter cuts bfloat16 off where the device rounds it to nearest.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2 if _INTERPRETED else 4e-3,
    torch.float64: 1e-12,
}
RIVAL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float64: 1e-12}


class Source:
    """Random rows of a layout, and masks of density one half."""

    def __init__(self, layout: Layout, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self._live = layout.live().to(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def rows(self, count: int) -> Tensor:
        """(count, P), normal."""
        rows = torch.empty(count, self.layout.size, dtype=self.dtype, device=self.device)
        for row in rows:
            row.normal_(generator=self._generator).mul_(self._live)
        return rows

    def row(self) -> Tensor:
        return self.rows(1)[0]

    def words(self, count: int) -> Tensor:
        """(count, P / 32) packed masks; every bit is an even chance."""
        shape = (count, self.layout.size // 32)
        bits = torch.empty(shape, dtype=torch.int32, device=self.device)
        bits.random_(-(2**31), 2**31, generator=self._generator)
        return bits & pack_mask(self._live)


def sample_counts(count: int) -> list[float]:
    """Whole numbers as weights, the same in all input sets: a compiled code has them built in."""
    drawn = torch.randint(1, 100, (count,), generator=torch.Generator().manual_seed(0))
    return [float(weight) for weight in drawn]


def as_float(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed masks as the papers' codes have them."""
    return unpack_mask(words).to(dtype)


def tensors(layout: Layout, rows: Tensor) -> list[dict[str, Tensor]]:
    return [layout.views(row) for row in rows]


def values(named: Mapping[str, Tensor]) -> list[Tensor]:
    return list(named.values())


def nan_like(tensor: Tensor) -> Tensor:
    """A buffer that a result has to overwrite."""
    return torch.full_like(tensor, torch.nan)
