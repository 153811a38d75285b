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
        layout: The layout of its row, narrower than the server's.
        row: Its values w_k, (P_k,).
        weight: Its weight a_k.
        labels: The labels that it holds; () for all.
    """

    layout: Layout
    row: Tensor
    weight: float
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A merge.

    Attributes:
        target: The layout of the server's row.
        old: The server's row before the merge, (P,).
        label_rows: The tensors whose rows are labels.
        parts: The clients.
    """

    target: Layout
    old: Tensor
    label_rows: tuple[str, ...]
    parts: list[Part]


def _covering(part: Part, name: str, index: Shape, label_rows: tuple[str, ...]) -> float | None:
    """Return the client's value of one element, or None where it does not cover it."""
    entry = next(entry for entry in part.layout if entry.name == name)
    is_outside = any(i >= size for i, size in zip(index, entry.shape, strict=True))
    if is_outside:
        return None

    has_labels = name in label_rows and part.labels
    if has_labels and index[0] not in part.labels:
        return None
    return float(part.layout.view(part.row, entry)[index])


def merged(case: Case) -> tuple[Tensor, Tensor]:
    """Merge by a loop over elements.

    Returns:
        The means in float64, (P,), where an element that nobody covers is as it was; and the total
        weight of each element, (P,).
    """
    means = case.old.double()
    weights = torch.zeros(case.target.size, dtype=torch.float64)
    for entry in case.target:
        tensor_means = case.target.view(means, entry)
        tensor_weights = case.target.view(weights, entry)
        for index in product(*(range(size) for size in entry.shape)):
            total = 0.0
            weight = 0.0
            for part in case.parts:
                value = _covering(part, entry.name, index, case.label_rows)
                if value is not None:
                    total += part.weight * value
                    weight += part.weight

            tensor_weights[index] = weight
            if weight > 0.0:
                tensor_means[index] = total / weight
    return means, weights


def coverage_of(case: Case) -> Coverage:
    """Return the coverage of a case; every client's layout is a source of its own."""
    layouts = [part.layout for part in case.parts]
    return Coverage.build(case.target, layouts, label_rows=case.label_rows)


def merge(
    case: Case,
    *,
    mine: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> Tensor:
    """Return what the server's row becomes, on a rank with these clients (by default all)."""
    row = case.old.clone()
    clients = list(range(len(case.parts)))
    local = clients if mine is None else sorted(mine)
    coverage_of(case).merge_(
        row,
        clients,
        local,
        [case.parts[client].row for client in local],
        weights=[part.weight for part in case.parts],
        labels=[part.labels or None for part in case.parts],
        ranks=ranks,
    )
    return row


@st.composite
def cases(draw: st.DrawFn, *, whole_weights: bool = False) -> Case:
    """Draw a server and one to five clients of any narrower shapes, weights and labels."""
    shapes = draw(st.lists(_shape, min_size=1, max_size=4))
    target = Layout.build((f"t{i}", shape) for i, shape in enumerate(shapes))

    with_axes = [entry.name for entry in target if entry.shape]
    label_rows: tuple[str, ...] = ()
    if with_axes:
        label_rows = tuple(draw(st.lists(st.sampled_from(with_axes), unique=True, max_size=2)))

    weight = st.integers(1, 500).map(float)
    if not whole_weights:
        weight = st.one_of(weight, st.floats(0.01, 100.0))

    parts = []
    for _ in range(draw(st.integers(1, 5))):
        parts.append(_part(draw, target, label_rows, draw(weight)))
    return Case(target, _row(draw, target), label_rows, parts)


_shape = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def _part(draw: st.DrawFn, target: Layout, label_rows: tuple[str, ...], weight: float) -> Part:
    """Draw a client: as wide as the server or narrower, with all labels or some."""
    is_full = draw(st.booleans())
    shapes = []
    for entry in target:
        # All classes are rows of every client's output layer; only its columns get narrower.
        num_kept = 1 if entry.name in label_rows else 0
        narrow = [draw(st.integers(1, size)) for size in entry.shape[num_kept:]]
        shapes.append(entry.shape if is_full else (*entry.shape[:num_kept], *narrow))
    layout = Layout.build((e.name, shape) for e, shape in zip(target, shapes, strict=True))

    num_labels = min((e.shape[0] for e in target if e.name in label_rows), default=0)
    labels: tuple[int, ...] = ()
    if num_labels and draw(st.booleans()):
        labels = tuple(sorted(draw(st.sets(st.integers(0, num_labels - 1), min_size=1))))
    return Part(layout, _row(draw, layout), weight, labels)


def _row(draw: st.DrawFn, layout: Layout) -> Tensor:
    """Draw values of ordinary magnitude with full mantissas: 2^-8 to 2^8, both signs."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = torch.randint(-8, 9, (layout.size,), generator=rng)
    mantissas = torch.rand(layout.size, generator=rng) + 1.0
    signs = torch.randint(0, 2, (layout.size,), generator=rng) * 2 - 1
    return torch.ldexp(mantissas * signs, exponents) * layout.live()
