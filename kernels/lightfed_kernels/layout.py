"""The flat row: all tensors of a model back to back in one contiguous vector.

Every kernel relies on these invariants. A tensor starts at a multiple of 32 elements, so that no
32-bit mask word has bits of two tensors, and tensors of float32 start at cache lines of 128 bytes.
The length of a row is a multiple of 32. Padding is always zero.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 32
# The most elements of a tile, the piece of a tensor that one program owns.
TILE = 4096


def padded(numel: int) -> int:
    """Return the number of elements up to where the next tensor may start."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Entry:
    """One tensor of a row: `row[offset : offset + numel].view(shape)`."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Ordered (name, shape, offset) of the tensors of a row of `size` elements."""

    entries: tuple[Entry, ...]
    size: int

    @classmethod
    def build(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> "Layout":
        """Lay tensors, given by name and shape, out in their order.

        Raises:
            ValueError: A name occurs twice.
        """
        entries: list[Entry] = []
        names: set[str] = set()
        offset = 0
        for name, shape in shapes:
            if name in names:
                raise ValueError(f"layout: tensor {name!r} occurs twice")
            names.add(name)
            entries.append(Entry(name, tuple(shape), offset))
            offset += padded(prod(shape))
        return cls(tuple(entries), offset)

    @cached_property
    def numel(self) -> int:
        """The number of elements that are not padding."""
        return sum(entry.numel for entry in self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def view(self, row: Tensor, entry: Entry) -> Tensor:
        """Return the tensor of `entry` as a view of a row (size,), or of rows (.., size)."""
        elements = row[..., entry.offset : entry.offset + entry.numel]
        return elements.view((*row.shape[:-1], *entry.shape))

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Return all tensors as views of a row, by name."""
        return {entry.name: self.view(row, entry) for entry in self.entries}

    def new_row(
        self,
        *clients: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> Tensor:
        """Return zeros of shape (*clients, size), so that padding is zero from the start."""
        return torch.zeros(*clients, self.size, dtype=dtype, device=device, pin_memory=pin_memory)

    def live(self) -> Tensor:
        """Return which elements belong to a tensor and not to padding, as (size,) of bool."""
        live = torch.zeros(self.size, dtype=torch.bool)
        for entry in self.entries:
            live[entry.offset : entry.offset + entry.numel] = True
        return live

    def span(self, count: int) -> int:
        """Return the length of the leading part of a row that holds the first `count` entries."""
        return self.entries[count].offset if count < len(self.entries) else self.size

    def only(self, names: Collection[str]) -> "Layout":
        """Return the layout of the same row with only these entries; other columns are unused."""
        return Layout(tuple(entry for entry in self.entries if entry.name in names), self.size)


def word_bounds(bounds: Tensor) -> list[tuple[int, int]]:
    """Return where the mask words of every tensor begin and end.

    Args:
        bounds: (T, 2): the offset and the number of elements of every tensor.
    """
    first = bounds[:, 0] // ALIGNMENT
    last = first + (bounds[:, 1] + ALIGNMENT - 1) // ALIGNMENT
    return list(zip(first.tolist(), last.tolist(), strict=True))
