"""The merge of slices as a loop over elements, and random cases for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from hypothesis import strategies as st
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.aggregation.coverage import Coverage
from lightfed.distributed.collectives import Ranks

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A client in a merge.

    Attributes:
        layout: narrower than the server's.
        row: (P_k,).
        weight: a_k.
        labels: that it holds; () for all.
    """

    layout: Layout
    row: Tensor
    weight: float
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    target: Layout
    old: Tensor
    label_rows: tuple[str, ...]
    parts: list[Part]

    @property
    def total(self) -> float:
        return sum(part.weight for part in self.parts)


def _covering(part: Part, name: str, index: Shape, label_rows: tuple[str, ...]) -> float | None:
    """The client's value of one element, or None where it does not cover it."""
    entry = next(e for e in part.layout if e.name == name)
    if any(i >= size for i, size in zip(index, entry.shape, strict=True)):
        return None
    if name in label_rows and part.labels and index[0] not in part.labels:
        return None
    return float(part.layout.view(part.row, entry)[index])


def merged(case: Case) -> tuple[Tensor, Tensor]:
    """(P,) float64 means, uncovered elements as they were, and (P,) total weights."""
    out = case.old.double()
    weights = torch.zeros(case.target.size, dtype=torch.float64)
    for entry in case.target:
        values = case.target.view(out, entry)
        counts = case.target.view(weights, entry)
        for index in product(*(range(size) for size in entry.shape)):
            total, weight = 0.0, 0.0
            for part in case.parts:
                value = _covering(part, entry.name, index, case.label_rows)
                if value is not None:
                    total += part.weight * value
                    weight += part.weight
            counts[index] = weight
            if weight > 0.0:
                values[index] = total / weight
    return out, weights


def coverage_of(case: Case) -> Coverage:
    """Every client's layout is a source of its own."""
    layouts = [part.layout for part in case.parts]
    return Coverage.build(case.target, layouts, label_rows=case.label_rows)


def merge(
    case: Case,
    *,
    mine: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> Tensor:
    """What the server's row becomes, on a rank with these clients (all by default)."""
    row = case.old.clone()
    everybody = list(range(len(case.parts)))
    here = everybody if mine is None else sorted(mine)
    coverage_of(case).merge_(
        row,
        everybody,
        here,
        [case.parts[k].row for k in here],
        weights=[part.weight for part in case.parts],
        labels=[part.labels or None for part in case.parts],
        ranks=ranks,
    )
    return row


@st.composite
def cases(draw: st.DrawFn, *, whole_weights: bool = False) -> Case:
    """A server and one to five clients of any narrower shapes, weights and labels."""
    shapes = draw(st.lists(_shape, min_size=1, max_size=4))
    names = [f"t{i}" for i in range(len(shapes))]
    target = Layout.build(zip(names, shapes, strict=True))
    sized = [name for name, shape in zip(names, shapes, strict=True) if shape]
    label_rows: tuple[str, ...] = ()
    if sized:
        label_rows = tuple(draw(st.lists(st.sampled_from(sized), unique=True, max_size=2)))
    number = st.integers(1, 500).map(float)
    weight = number if whole_weights else st.one_of(number, st.floats(0.01, 100.0))
    parts = [_part(draw, target, label_rows, draw(weight)) for _ in range(draw(st.integers(1, 5)))]
    return Case(target, _row(draw, target), label_rows, parts)


_shape = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def _part(draw: st.DrawFn, target: Layout, label_rows: tuple[str, ...], weight: float) -> Part:
    full = draw(st.booleans())
    shapes = []
    for entry in target:
        # All classes are rows of every client's output layer; only its columns get narrower.
        kept = 1 if entry.name in label_rows else 0
        narrow = [draw(st.integers(1, size)) for size in entry.shape[kept:]]
        shapes.append(entry.shape if full else (*entry.shape[:kept], *narrow))
    layout = Layout.build((e.name, s) for e, s in zip(target, shapes, strict=True))
    rows = min((e.shape[0] for e in target if e.name in label_rows), default=0)
    labels: tuple[int, ...] = ()
    if rows and draw(st.booleans()):
        labels = tuple(sorted(draw(st.sets(st.integers(0, rows - 1), min_size=1))))
    return Part(layout, _row(draw, layout), weight, labels)


def _row(draw: st.DrawFn, layout: Layout) -> Tensor:
    """Values of ordinary magnitude with full mantissas: 2^-8 to 2^8, both signs."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = torch.randint(-8, 9, (layout.size,), generator=rng)
    mantissas = torch.rand(layout.size, generator=rng) + 1.0
    signs = torch.randint(0, 2, (layout.size,), generator=rng) * 2 - 1
    return torch.ldexp(mantissas * signs, exponents) * layout.live()
