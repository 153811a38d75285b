"""Clients to ranks, longest first, and who changes places: by hand and against the best."""

from collections import Counter
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.distributed.placement import exchanges, place


def makespan(costs: Mapping[int, float], owner: Mapping[int, int], ranks: int) -> float:
    return max(sum(c for k, c in costs.items() if owner[k] == rank) for rank in range(ranks))


def test_the_longest_go_first_to_the_emptiest_rank() -> None:
    # 9 | 7, then 6 joins the 7, 5 the 9, 2 the 13 of rank 1, and 1 the 14 of rank 0.
    costs = {0: 5.0, 1: 9.0, 2: 7.0, 3: 6.0, 4: 2.0, 5: 1.0}
    assert place(costs, ranks=2) == {1: 0, 2: 1, 3: 1, 0: 0, 4: 1, 5: 0}


def test_ties_go_to_the_lower_client_and_the_lower_rank() -> None:
    assert place(dict.fromkeys([7, 3, 5, 1], 1.0), ranks=3) == {1: 0, 3: 1, 5: 2, 7: 0}


def test_more_ranks_than_clients_leave_ranks_idle() -> None:
    assert place({0: 1.0, 1: 2.0}, ranks=4) == {1: 0, 0: 1}


_costs = st.dictionaries(st.integers(0, 20), st.integers(1, 50).map(float), min_size=1, max_size=7)


@settings(max_examples=25)
@given(_costs, st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_answer_depends_on_the_costs_alone(
    costs: dict[int, float], ranks: int, rng: object
) -> None:
    items = list(costs.items())
    rng.shuffle(items)  # type: ignore[attr-defined]
    assert place(dict(items), ranks=ranks) == place(costs, ranks=ranks)


@settings(max_examples=25)
@given(_costs, st.integers(1, 3))
def test_no_placement_is_much_better(costs: dict[int, float], ranks: int) -> None:
    owner = place(costs, ranks=ranks)
    assert set(owner) == set(costs)
    assert set(owner.values()) <= set(range(ranks))
    every = (
        dict(zip(costs, ways, strict=True)) for ways in product(range(ranks), repeat=len(costs))
    )
    best = min(makespan(costs, other, ranks) for other in every)
    # Graham's bound for longest processing time first.
    assert makespan(costs, owner, ranks) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


HOMES = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
GROUPS = [0] * 6
MEGABYTES = 10**6


def two_ranks(costs: dict[int, float], *, size: int = 1000) -> list[tuple[int, int]]:
    return exchanges(costs, HOMES, GROUPS, [size], ranks=2)


def test_a_participant_changes_places_with_a_client_that_takes_no_part() -> None:
    assert two_ranks({0: 5.0, 1: 4.0, 2: 1.0}) == [(0, 3)]


def test_clients_change_places_within_their_group() -> None:
    costs = {0: 5.0, 1: 5.0}
    assert exchanges(costs, HOMES, [0, 0, 0, 0, 1, 1], [1, 1], ranks=2) == [(0, 3)]
    assert exchanges(costs, HOMES, [0, 0, 0, 1, 1, 1], [1, 1], ranks=2) == []


def test_the_next_rank_helps_if_the_least_busy_one_cannot() -> None:
    homes = {0: 0, 1: 0, 2: 1, 3: 2}
    found = exchanges({0: 5.0, 1: 4.0, 2: 0.5}, homes, [0, 0, 0, 1], [1, 1], ranks=3)
    assert found == [(0, 2)]


@pytest.mark.parametrize(
    ("costs", "size"),
    [
        ({}, 1000),
        ({0: 1.0, 3: 0.9}, 1000),
        ({0: 5.0}, 1000),  # a single session is as long anywhere
        ({0: 5.4, 1: 0.6, 3: 5.0}, 1000),  # less than a tenth
        ({0: 0.05, 1: 0.04}, 1000),  # less than the ranks need to meet
        ({0: 5.0, 1: 4.0}, 400 * MEGABYTES),  # 4 s to save, and 4 s to send
    ],
)
def test_a_gain_that_is_small_or_costs_more_moves_nothing(
    costs: dict[int, float], size: int
) -> None:
    assert two_ranks(costs, size=size) == []


def test_only_the_pairs_that_pay_move() -> None:
    # 7 | 0, 4 | 3, 3.5 | 3.5: the second pair saves less than it takes to send one more row.
    costs, homes = {0: 3.0, 1: 3.0, 2: 0.5, 3: 0.5}, {k: k // 4 for k in range(8)}
    for size, pairs in ((1000, [(0, 4), (2, 5)]), (60 * MEGABYTES, [(0, 4)])):
        assert exchanges(costs, homes, [0] * 8, [size], ranks=2) == pairs


@st.composite
def _federations(draw: st.DrawFn) -> tuple[dict[int, float], dict[int, int], list[int], int]:
    ranks, count = draw(st.integers(2, 4)), draw(st.integers(2, 30))
    groups = sorted(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    homes = {k: draw(st.integers(0, ranks - 1)) for k in range(count)}
    chosen = draw(st.sets(st.integers(0, count - 1), min_size=1))
    return {k: draw(st.integers(1, 50)) / 2 for k in chosen}, homes, groups, ranks


@settings(max_examples=100)
@given(_federations(), st.randoms(use_true_random=False))
def test_moves_keep_the_numbers_of_rows_and_save_more_than_they_cost(
    federation: tuple[dict[int, float], dict[int, int], list[int], int], rng: object
) -> None:
    costs, homes, groups, ranks = federation
    pairs = exchanges(costs, homes, groups, [50 * MEGABYTES] * 3, ranks=ranks)
    moving = [client for pair in pairs for client in pair]
    assert len(moving) == len(set(moving))
    after = dict(homes)
    for one, other in pairs:
        assert groups[one] == groups[other]
        assert homes[one] != homes[other]
        after[one], after[other] = homes[other], homes[one]
    rows = [Counter((groups[k], place[k]) for k in homes) for place in (homes, after)]
    assert rows[0] == rows[1]
    if pairs:
        sent = max(Counter(homes[k] for k in moving).values()) * 0.5
        assert makespan(costs, after, ranks) + sent < 0.9 * makespan(costs, homes, ranks)
    items = list(costs.items())
    rng.shuffle(items)  # type: ignore[attr-defined]
    assert exchanges(dict(items), homes, groups, [50 * MEGABYTES] * 3, ranks=ranks) == pairs
