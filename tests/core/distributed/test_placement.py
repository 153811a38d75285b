"""Clients to ranks, longest first: by hand and against the best."""

from collections.abc import Mapping
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.distributed.placement import place


def makespan(costs: Mapping[int, float], rank_of: Mapping[int, int], ranks: int) -> float:
    """The load of the busiest rank."""
    loads = [0.0] * ranks
    for client, cost in costs.items():
        loads[rank_of[client]] += cost
    return max(loads)


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
    rank_of = place(costs, ranks=ranks)
    assert set(rank_of) == set(costs)
    assert set(rank_of.values()) <= set(range(ranks))

    best = min(
        makespan(costs, dict(zip(costs, ranks_of_clients, strict=True)), ranks)
        for ranks_of_clients in product(range(ranks), repeat=len(costs))
    )
    # Graham's bound for longest processing time first.
    bound = (4 / 3 - 1 / (3 * ranks)) * best
    assert makespan(costs, rank_of, ranks) <= bound + 1e-9
