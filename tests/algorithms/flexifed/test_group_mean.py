"""Means of groups against a loop over tensors; one rank and several get the same bits."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.algorithms.flexifed.group_mean import GroupMeans, SharedTensors
from lightfed.distributed.collectives import Ranks
from lightfed.state.rows import ModelLayout, Row
from tests.core.distributed.threads import on_ranks
from tests.small import CPU

ONE = Ranks(CPU)

SHAPES = {"a": (3, 5), "b": (40,), "c": (32,), "d": (2, 2, 2), "e": (7,), "n": (), "m": (3,)}
PARAMETERS, BUFFERS, INTEGERS = "abc", "de", "nm"


def layout_of(tensors: Sequence[str]) -> ModelLayout:
    """Of tensors in this order, each kind by itself."""

    def part(kind: str) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, SHAPES[name]) for name in tensors if name in kind]

    parameters = part(PARAMETERS)
    floats = Layout.build([*parameters, *part(BUFFERS)])
    return ModelLayout(floats, Layout.build(part(INTEGERS)), len(parameters))


@dataclass(frozen=True)
class Case:
    """Participants 0, 1, ... of some groups, and what is shared.

    Attributes:
        layouts: of the groups.
        shared: sets of tensors.
        groups: of the participants.
        weights: of those whose values count.
        rows: of the participants.
    """

    layouts: list[ModelLayout]
    shared: list[SharedTensors]
    groups: dict[int, int]
    weights: dict[int, float]
    rows: dict[int, Row]

    @property
    def means(self) -> GroupMeans:
        return GroupMeans(self.shared, self.layouts, self.groups)

    def copies(self, some: Sequence[int]) -> dict[int, Row]:
        return {k: Row(self.rows[k].floats.clone(), self.rows[k].integers.clone()) for k in some}


def filled(layout: ModelLayout, rng: torch.Generator) -> Row:
    """Random values; padding is zero."""
    row = Row(layout.floats.new_row(), layout.integers.new_row(dtype=torch.int64))
    for view in layout.floats.views(row.floats).values():
        view.copy_(torch.randn(view.shape, generator=rng))
    for view in layout.integers.views(row.integers).values():
        view.copy_(torch.randint(-9, 9, view.shape, generator=rng))
    return row


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Every group has some of the tensors in an order; groups share some of what they have."""
    orders = draw(st.lists(st.permutations(sorted(SHAPES)), min_size=1, max_size=3))
    held = [order[: draw(st.integers(1, len(SHAPES)))] for order in orders]
    shared: dict[tuple[int, ...], list[str]] = {}
    for name in draw(st.permutations(sorted(SHAPES))):
        havers = [c for c, names in enumerate(held) if name in names]
        if chosen := draw(st.sets(st.sampled_from(havers))) if havers else set():
            shared.setdefault(tuple(sorted(chosen)), []).append(name)
    parts = [SharedTensors(dict.fromkeys(groups, tuple(names))) for groups, names in shared.items()]
    members = draw(st.lists(st.integers(0, len(held) - 1), min_size=1, max_size=6))
    layouts = [layout_of(names) for names in held]
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return Case(
        layouts,
        parts,
        dict(enumerate(members)),
        draw(st.dictionaries(st.integers(0, len(members) - 1), st.integers(1, 60).map(float))),
        {k: filled(layouts[group], rng) for k, group in enumerate(members)},
    )


def tensors_of(case: Case, rows: Mapping[int, Row], client: int) -> dict[str, Tensor]:
    layout, row = case.layouts[case.groups[client]], rows[client]
    return layout.floats.views(row.floats) | layout.integers.views(row.integers)


def expected_of(case: Case) -> dict[int, Row]:
    """Tensor by tensor."""
    rows = case.copies(sorted(case.rows))
    views = {k: tensors_of(case, rows, k) for k in rows}
    for part in case.shared:
        members = [k for k in rows if case.groups[k] in part.names]
        weights = {k: case.weights[k] for k in members if k in case.weights}
        names = {name for names in part.names.values() for name in names}
        for name in names if weights and len(members) > 1 else ():
            if name in INTEGERS:
                mean = torch.stack([views[k][name] for k in weights]).amax(0)
            else:
                addends = [a * views[k][name].double() for k, a in weights.items()]
                mean = torch.stack(addends).sum(0) / sum(weights.values())
            for k in members:
                views[k][name].copy_(mean)
    return rows


def same(one: Mapping[int, Row], other: Mapping[int, Row]) -> bool:
    return all(
        torch.equal(one[k].floats, other[k].floats)
        and torch.equal(one[k].integers, other[k].integers)
        for k in one
    )


@settings(max_examples=40)
@given(cases())
def test_groups_are_averaged_tensor_by_tensor(case: Case) -> None:
    rows = case.copies(sorted(case.rows))
    case.means.mean_(rows, weights=case.weights, ranks=ONE)
    assert same(rows, expected_of(case))  # float64 sums of a few normal numbers are exact


def on_several(case: Case, owners: Sequence[int]) -> dict[int, Row]:
    """All rows, after every rank has done its part; all come to the same collectives."""

    def run(ranks: Ranks) -> dict[int, Row]:
        rows = case.copies([k for k, owner in enumerate(owners) if owner == ranks.rank])
        case.means.mean_(rows, weights=case.weights, ranks=ranks)
        return rows

    return {k: row for part in on_ranks(max(owners) + 1, run) for k, row in part.items()}


@settings(max_examples=30)
@given(cases(), st.randoms(use_true_random=False))
def test_the_bits_are_those_of_one_rank_on_any_number_of_ranks(
    case: Case, rng: random.Random
) -> None:
    owners = [rng.randrange(3) for _ in case.rows]  # a rank may have no participant
    rows = case.copies(sorted(case.rows))
    case.means.mean_(rows, weights=case.weights, ranks=ONE)
    assert same(on_several(case, owners), rows)


def two_groups(shared: list[SharedTensors], *, clients: Sequence[int] = (0, 0, 1)) -> Case:
    """Tensors a, d, n in the one; b, a, n, m, d in the other."""
    layouts = [layout_of("adn"), layout_of("banmd")]
    rng = torch.Generator().manual_seed(0)
    rows = {k: filled(layouts[group], rng) for k, group in enumerate(clients)}
    return Case(layouts, shared, dict(enumerate(clients)), dict.fromkeys(rows, 1.0), rows)


def test_bytes_are_those_of_the_groups_with_company() -> None:
    shared = [
        SharedTensors({0: ("a", "n"), 1: ("a", "n")}),
        SharedTensors({0: ("d",)}),
        SharedTensors({1: ("b", "m")}),
    ]
    means = two_groups(shared).means
    common = 4 * 15 + 8 * 1  # a and n; the other groups' sizes are d 8, b 40, m 3 elements
    assert [means.bytes(k) for k in range(3)] == [common + 4 * 8, common + 4 * 8, common]


def test_a_client_alone_sends_nothing_and_meets_nobody() -> None:
    case = two_groups([SharedTensors({0: ("a", "d", "n")})], clients=(0, 1, 1))
    assert not any(case.means.bytes(k) for k in range(3))

    rows = case.copies([0, 1, 2])
    ranks = Ranks(CPU)
    ranks.world = 2  # without a process group: a collective would raise
    case.means.mean_(rows, weights={0: 1.0}, ranks=ranks)
    assert same(rows, case.rows)


def test_what_does_not_count_may_be_anything() -> None:
    case = two_groups([SharedTensors({0: ("a",), 1: ("a",)})])
    case.rows[1].floats.fill_(torch.nan)
    rows = case.copies([0, 1, 2])
    case.means.mean_(rows, weights={0: 1.0, 2: 1.0}, ranks=ONE)
    one, other = tensors_of(case, rows, 0)["a"], tensors_of(case, rows, 1)["a"]
    assert torch.equal(one, other)
    assert not one.isnan().any()
