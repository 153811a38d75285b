"""Random federations of slices: layouts with groups, labels and absent tensors, and rows."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from lightfed_kernels import Layout, Members, SliceTable
from lightfed_kernels.reference import slices as reference
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SliceCase:
    """A target, levels, and clients; one client per entry of `level_of`."""

    target: Layout
    levels: list[Layout]
    groups: dict[str, Shape]
    label_rows: tuple[str, ...]
    level_of: list[int]
    weights: list[float]
    labels: list[list[int] | None]
    seed: int

    def table(self, device: torch.device) -> SliceTable:
        return SliceTable.build(
            self.target, self.levels, groups=self.groups, label_rows=self.label_rows, device=device
        )

    def members(self, device: torch.device, local: list[int] | None = None) -> Members:
        return Members.build(
            self.table(device), self.level_of, weights=self.weights, labels=self.labels, local=local
        )

    def layout(self, client: int) -> Layout:
        return self.levels[self.level_of[client]]

    def old(self, dtype: torch.dtype) -> Tensor:
        """The target's row."""
        return self._row(self.target, 0, dtype)

    def rows(self, dtype: torch.dtype) -> list[Tensor]:
        """Of the clients; one of weight 0 holds NaN."""
        rows = [self._row(self.layout(k), k + 1, dtype) for k in range(len(self.level_of))]
        return [row if w else row * torch.nan for row, w in zip(rows, self.weights, strict=True)]

    def _row(self, layout: Layout, number: int, dtype: torch.dtype) -> Tensor:
        """Full mantissas, magnitudes 2^-6 to 2^6, both signs."""
        rng = torch.Generator().manual_seed(self.seed * 100 + number)
        exponents = torch.randint(-6, 7, (layout.size,), generator=rng)
        values = torch.rand(layout.size, generator=rng, dtype=torch.float64) + 1.0
        signs = torch.randint(0, 2, (layout.size,), generator=rng) * 2 - 1
        return (torch.ldexp(values * signs, exponents) * layout.live()).to(dtype)

    def expected(self, dtype: torch.dtype) -> Tensor:
        return reference.merge(
            self.old(dtype),
            self.target,
            self.rows(dtype),
            [self.layout(k) for k in range(len(self.level_of))],
            weights=self.weights,
            labels=self.labels,
            label_rows=self.label_rows,
            groups=self.groups,
        )


@st.composite
def slice_cases(draw: st.DrawFn, *, whole_weights: bool = True) -> SliceCase:
    """One to five tensors of up to three dimensions, one to four levels, one to five clients."""
    target, groups, label_rows = _target(draw)
    levels = [_level(draw, target, groups, label_rows) for _ in range(draw(st.integers(1, 4)))]
    clients = draw(st.integers(1, 5))
    level_of = [draw(st.integers(0, len(levels) - 1)) for _ in range(clients)]
    number = st.one_of(st.just(0.0), st.integers(1, 500).map(float))
    weight = number if whole_weights else st.one_of(number, st.floats(0.01, 100.0))
    weights = [draw(weight) for _ in range(clients)]
    count = max((e.shape[0] for e in target if e.name in label_rows), default=0)
    held = st.sets(st.integers(0, count - 1)).map(sorted) if count else st.just([])
    labels = [draw(st.one_of(st.none(), held)) for _ in range(clients)]
    seed = draw(st.integers(0, 10**6))
    return SliceCase(target, levels, groups, label_rows, level_of, weights, labels, seed)


def _target(draw: st.DrawFn) -> tuple[Layout, dict[str, Shape], tuple[str, ...]]:
    shapes: list[tuple[str, Shape]] = []
    groups: dict[str, Shape] = {}
    label_rows: list[str] = []
    for position in range(draw(st.integers(1, 5))):
        name = f"t{position}"
        kind = draw(st.sampled_from(["plain", "aligned", "grouped", "labels"]))
        if kind == "plain":
            shape = draw(st.lists(st.integers(1, 7), max_size=3).map(tuple))
        elif kind == "aligned":
            shape = draw(st.sampled_from([(8,), (64,), (16, 24), (4, 8, 3), (2, 640)]))
        elif kind == "grouped":
            heads = draw(st.sampled_from([2, 3]))
            rows = heads * draw(st.sampled_from([2, 4]))
            shape, groups[name] = draw(
                st.sampled_from(
                    [((rows, 6), (heads, 1)), ((6, rows), (1, heads)), ((rows,), (heads,))]
                )
            )
        else:
            shape = draw(st.sampled_from([(5,), (5, 4), (40, 3)]))
            label_rows.append(name)
        shapes.append((name, shape))
    return Layout.build(shapes), groups, tuple(label_rows)


def _level(
    draw: st.DrawFn, target: Layout, groups: dict[str, Shape], label_rows: tuple[str, ...]
) -> Layout:
    """The whole, or any slices of all, or of some tensors."""
    kind = draw(st.sampled_from(["whole", "slices", "slices", "some"]))
    if kind == "whole":
        return target
    shapes: list[tuple[str, Shape]] = []
    for entry in target:
        if kind == "some" and len(target.entries) - len(shapes) > 1 and draw(st.booleans()):
            continue
        counts = groups.get(entry.name, (1,) * len(entry.shape))
        shape = tuple(
            size
            if entry.name in label_rows and dim == 0
            else count * draw(st.integers(1, size // count))
            for dim, (size, count) in enumerate(zip(entry.shape, counts, strict=True))
        )
        shapes.append((entry.name, shape))
    if not shapes:
        shapes = [(target.entries[0].name, target.entries[0].shape)]
    return Layout.build(shapes)
