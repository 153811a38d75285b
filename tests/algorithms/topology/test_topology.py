"""Who hears whom: by hand on small rings and grids, and what holds for every graph and draw."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.algorithms.topology.topology import (
    Full,
    NetworkX,
    Ring,
    TimeVarying,
    Topology,
    round_senders,
)
from lightfed.utils.errors import UserError

KEY = "model.algorithm.init_args.topology.init_args"
seeds = st.integers(0, 2**40)
rounds = st.integers(0, 1000)


@st.composite
def topologies(draw: st.DrawFn) -> tuple[Topology, int]:
    """A topology and a number of clients that it fits."""
    clients = draw(st.integers(4, 17))
    choices: list[st.SearchStrategy[Topology]] = [
        st.just(Ring()),
        st.just(Full()),
        st.builds(TimeVarying, st.integers(1, clients - 1)),
        st.just(NetworkX("star_graph", {"n": clients - 1})),
    ]
    return draw(st.one_of(choices)), clients


def lists(topology: Topology, clients: int, *, t: int = 0, seed: int = 0) -> list[list[int]]:
    """Whom each client hears."""
    topology.check(clients)
    return list(round_senders(topology, t, clients=clients, seed=seed).values())


@settings(deadline=None, max_examples=40)
@given(topologies(), rounds, seeds)
def test_every_list_ascends_without_its_owner_and_all_but_drawn_ones_are_both_ways(
    drawn: tuple[Topology, int], t: int, seed: int
) -> None:
    topology, clients = drawn
    topology.check(clients)
    heard = round_senders(topology, t, clients=clients, seed=seed)
    assert list(heard) == list(range(clients))
    for client, others in heard.items():
        assert others == sorted(set(others) - {client})
        assert set(others) <= set(range(clients))
        assert all(type(other) is int for other in others)
        if not isinstance(topology, TimeVarying):
            assert all(client in heard[other] for other in others)


def test_ring() -> None:
    assert lists(Ring(), 5) == [[1, 4], [0, 2], [1, 3], [2, 4], [0, 3]]
    assert lists(Ring(), 2) == [[1], [0]]
    assert lists(Ring(), 1) == [[]]


def test_full() -> None:
    assert lists(Full(), 4) == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert lists(Full(), 1) == [[]]


def test_graphs_of_networkx() -> None:
    assert lists(NetworkX("star_graph", {"n": 3}), 4) == [[1, 2, 3], [0], [0], [0]]
    #  0  1  2  3
    #  4  5  6  7
    #  8  9 10 11
    grid = lists(NetworkX("grid_2d_graph", {"m": 3, "n": 4, "periodic": True}), 12)
    assert grid[5] == [1, 4, 6, 9]
    assert grid[0] == [1, 3, 4, 8]
    assert {len(heard) for heard in grid} == {4}


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 30), st.data(), rounds, seeds)
def test_time_varying_draws_that_many(clients: int, data: st.DataObject, t: int, seed: int) -> None:
    neighbours = data.draw(st.integers(1, clients - 1))
    heard = lists(TimeVarying(neighbours), clients, t=t, seed=seed)
    assert {len(others) for others in heard} == {neighbours}
    if neighbours == clients - 1:
        assert heard == lists(Full(), clients)


def test_a_graph_drawn_once_is_named_by_the_seed() -> None:
    topology = NetworkX("random_regular_graph", {"d": 4, "n": 40})
    assert lists(topology, 40, seed=1) == lists(topology, 40, seed=1)
    assert lists(topology, 40, seed=1) != lists(topology, 40, seed=2)
    assert {len(heard) for heard in lists(topology, 40)} == {4}
    fixed = NetworkX("random_regular_graph", {"d": 4, "n": 40, "seed": 3})
    assert lists(fixed, 40, seed=1) == lists(fixed, 40, seed=2)


@pytest.mark.parametrize(
    "topology", [Ring(), Full(), TimeVarying(4), NetworkX("star_graph", {"n": 8})]
)
def test_inactive_clients_drop_out_of_the_same_draw(topology: Topology) -> None:
    everyone = round_senders(topology, 2, clients=9, seed=1)
    some = round_senders(topology, 2, clients=9, seed=1, active=[8, 1, 3, 4])
    assert list(some) == [1, 3, 4, 8]
    for client, heard in some.items():
        assert heard == [other for other in everyone[client] if other in {1, 3, 4, 8}]


@pytest.mark.parametrize(
    ("argument", "fragment", "make"),
    [
        (
            "neighbours",
            "10, but each of 5 clients has 4",
            lambda: lists(TimeVarying(), 5),
        ),
        ("neighbours", "0; give at least 1", lambda: TimeVarying(0)),
        ("generator", "no_graph", lambda: lists(NetworkX("no_graph", {}), 5)),
        ("arguments", "missing", lambda: lists(NetworkX("star_graph", {}), 5)),
        ("arguments", "even", lambda: lists(NetworkX("random_regular_graph", {"d": 3, "n": 5}), 5)),
        ("arguments", "4 nodes, for 5", lambda: lists(NetworkX("path_graph", {"n": 4}), 5)),
    ],
)
def test_errors_name_their_key(argument: str, fragment: str, make: Callable[[], object]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert error.value.key == f"{KEY}.{argument}"
    assert fragment in str(error.value)
    assert "\n" not in str(error.value)
