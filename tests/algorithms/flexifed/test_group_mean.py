"""Means of groups against a loop over tensors; one rank and several get the same bits."""

import random
from collections.abc import Iterable, Mapping, Sequence
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
    """Return the layout of some tensors in this order, each kind by itself."""
    parameters = [(name, SHAPES[name]) for name in tensors if name in PARAMETERS]
    buffers = [(name, SHAPES[name]) for name in tensors if name in BUFFERS]
    integers = [(name, SHAPES[name]) for name in tensors if name in INTEGERS]
    floats = Layout.build([*parameters, *buffers])
    return ModelLayout(floats, Layout.build(integers), len(parameters))


@dataclass(frozen=True)
class Case:
    """Participants 0, 1, ... of some groups, and what is shared.

    Attributes:
        layouts: The layout of each group.
        shared: Disjoint sets of tensors.
        groups: The group of each participant.
        weights: The weights of those whose values count.
        rows: The row of each participant.
    """

    layouts: list[ModelLayout]
    shared: list[SharedTensors]
    groups: dict[int, int]
    weights: dict[int, float]
    rows: dict[int, Row]

    @property
    def means(self) -> GroupMeans:
        return GroupMeans(self.shared, self.layouts, self.groups)

    def copies(self, clients: Iterable[int]) -> dict[int, Row]:
        return {k: self.rows[k].clone() for k in clients}

    def tensors(self, rows: Mapping[int, Row], client: int) -> dict[str, Tensor]:
        """Return the tensors of a client as views of its row."""
        layout = self.layouts[self.groups[client]]
        row = rows[client]
        return layout.floats.views(row.floats) | layout.integers.views(row.integers)


def filled(layout: ModelLayout, rng: torch.Generator) -> Row:
    """Return a row of random values; padding is zero."""
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
    tensors_of_groups = [order[: draw(st.integers(1, len(SHAPES)))] for order in orders]
    layouts = [layout_of(tensors) for tensors in tensors_of_groups]

    tensors_shared_by: dict[tuple[int, ...], list[str]] = {}
    for name in draw(st.permutations(sorted(SHAPES))):
        owners = [group for group, tensors in enumerate(tensors_of_groups) if name in tensors]
        if not owners:
            continue
        sharers = draw(st.sets(st.sampled_from(owners)))
        if sharers:
            tensors_shared_by.setdefault(tuple(sorted(sharers)), []).append(name)
    shared = []
    for groups, names in tensors_shared_by.items():
        shared.append(SharedTensors(dict.fromkeys(groups, tuple(names))))

    group_of = draw(st.lists(st.integers(0, len(layouts) - 1), min_size=1, max_size=6))
    clients = st.integers(0, len(group_of) - 1)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return Case(
        layouts,
        shared,
        dict(enumerate(group_of)),
        draw(st.dictionaries(clients, st.integers(1, 60).map(float))),
        {k: filled(layouts[group], rng) for k, group in enumerate(group_of)},
    )


def expected_of(case: Case) -> dict[int, Row]:
    """Return the rows that the case should end with, averaged tensor by tensor."""
    rows = case.copies(case.rows)
    tensors = {k: case.tensors(rows, k) for k in rows}
    for shared in case.shared:
        members = [k for k in rows if case.groups[k] in shared.names]
        weights = {k: case.weights[k] for k in members if k in case.weights}
        if len(members) < 2 or not weights:
            continue

        # In these cases a tensor has one name in all groups.
        for name in shared.names[case.groups[members[0]]]:
            if name in INTEGERS:
                result = torch.stack([tensors[k][name] for k in weights]).amax(0)
            else:
                addends = [weight * tensors[k][name].double() for k, weight in weights.items()]
                result = torch.stack(addends).sum(0) / sum(weights.values())
            for k in members:
                tensors[k][name].copy_(result)
    return rows


def same(one: Mapping[int, Row], other: Mapping[int, Row]) -> bool:
    """Return whether clients have the same rows."""
    for k in one:
        if not torch.equal(one[k].floats, other[k].floats):
            return False
        if not torch.equal(one[k].integers, other[k].integers):
            return False
    return True


@settings(max_examples=40)
@given(cases())
def test_groups_are_averaged_tensor_by_tensor(case: Case) -> None:
    rows = case.copies(case.rows)
    case.means.mean_(rows, weights=case.weights, ranks=ONE)
    assert same(rows, expected_of(case))  # float64 sums of a few normal numbers are exact


def on_several(case: Case, owners: Sequence[int]) -> dict[int, Row]:
    """Return all rows after every rank has done its part; all come to the same collectives."""

    def run(ranks: Ranks) -> dict[int, Row]:
        rows = case.copies([k for k, owner in enumerate(owners) if owner == ranks.rank])
        case.means.mean_(rows, weights=case.weights, ranks=ranks)
        return rows

    rows: dict[int, Row] = {}
    for of_a_rank in on_ranks(max(owners) + 1, run):
        rows |= of_a_rank
    return rows


@settings(max_examples=30)
@given(cases(), st.randoms(use_true_random=False))
def test_the_bits_are_those_of_one_rank_on_any_number_of_ranks(
    case: Case, rng: random.Random
) -> None:
    owners = [rng.randrange(3) for _ in case.rows]  # a rank may have no participant
    rows = case.copies(case.rows)
    case.means.mean_(rows, weights=case.weights, ranks=ONE)
    assert same(on_several(case, owners), rows)


def two_groups(shared: list[SharedTensors], *, clients: Sequence[int] = (0, 0, 1)) -> Case:
    """Return a case whose groups have the tensors a, d, n, and b, a, n, m, d."""
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
    # a has 15 elements, n 1 and d 8. Client 2 is alone with b and m, which are not sent.
    a_and_n = 4 * 15 + 8 * 1
    d = 4 * 8
    assert [means.bytes(k) for k in range(3)] == [a_and_n + d, a_and_n + d, a_and_n]


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
    counts = case.tensors(rows, 0)["a"]
    does_not_count = case.tensors(rows, 1)["a"]
    assert torch.equal(counts, does_not_count)
    assert not counts.isnan().any()
