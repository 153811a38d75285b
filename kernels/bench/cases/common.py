"""Makes input sets of seeded rows and masks, and the forms in which a code takes them."""

from collections.abc import Iterable

import torch
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import pack_mask, unpack_mask
from torch import Tensor


class Source:
    """Draws rows of a layout and masks in which half of the elements are covered.

    Both are zero in padding.

    Args:
        layout: The layout of the rows.
        seed: The seed of all draws.
        dtype: The dtype of the rows.
        device: Where they are.
    """

    def __init__(self, layout: Layout, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self._live = layout.live().to(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def rows(self, count: int) -> Tensor:
        """Draw normal rows, (count, P)."""
        rows = torch.empty(count, self.layout.size, dtype=self.dtype, device=self.device)
        for row in rows:
            row.normal_(generator=self._generator).mul_(self._live)
        return rows

    def row(self) -> Tensor:
        """Draw one normal row, (P,)."""
        return self.rows(1)[0]

    def words(self, count: int) -> Tensor:
        """Draw packed masks, (count, P / 32), in which every bit is 1 with probability 1/2."""
        shape = (count, self.layout.size // 32)
        bits = torch.empty(shape, dtype=torch.int32, device=self.device)
        bits.random_(-(2**31), 2**31, generator=self._generator)
        return bits & pack_mask(self._live)


def as_float(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return packed masks as numbers 0 and 1, as the papers' codes have them."""
    return unpack_mask(words).to(dtype)


def whole(layout: Layout, rows: Iterable[Tensor]) -> list[Tensor]:
    """Return every row as it is, for a `flat` code."""
    return list(rows)


def named(layout: Layout, rows: Iterable[Tensor]) -> list[dict[str, Tensor]]:
    """Return every row as views by name, for the papers' codes."""
    return [layout.views(row) for row in rows]


def listed(layout: Layout, rows: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return every row as a list of views, for a `foreach` code."""
    return [list(layout.views(row).values()) for row in rows]


def plural(count: int, noun: str) -> str:
    """Return a number with a noun: "1 client", "10 clients"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
