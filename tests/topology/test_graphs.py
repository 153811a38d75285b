"""Random graphs by what defines them; spectral gaps in closed form."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.topology.topology import (
    Adjacency,
    Full,
    Lists,
    RandomRegular,
    Ring,
    Star,
    TimeVarying,
    Topology,
    _random_regular,
    _small_world,
    graph,
    spectral_gap,
    summarise,
)

seeds = st.integers(0, 2**40)


def links(lists: Lists) -> np.ndarray:
    """(K, K) bool of neighbour lists."""
    matrix = np.zeros((len(lists), len(lists)), dtype=np.bool_)
    for client, known in enumerate(lists):
        matrix[client, list(known)] = True
    return matrix


def gap(topology: Topology, clients: int) -> float:
    topology.check(clients)
    return spectral_gap(graph(topology, 0, clients=clients, seed=0))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 24), st.data(), seeds)
def test_random_regular_is_regular_and_simple(clients: int, data: st.DataObject, seed: int) -> None:
    even = [degree for degree in range(clients) if clients * degree % 2 == 0]
    degree = data.draw(st.sampled_from(even))
    matrix = links(_random_regular(clients, degree, seed=seed))
    assert (matrix.sum(axis=1) == degree).all()
    assert (matrix == matrix.T).all()
    assert not matrix.diagonal().any()


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 24), st.data(), st.floats(0, 1), seeds)
def test_small_world_keeps_its_edges_in_number(
    clients: int, data: st.DataObject, rewire: float, seed: int
) -> None:
    half = data.draw(st.integers(1, (clients - 1) // 2))
    matrix = links(_small_world(clients, 2 * half, rewire, seed=seed))
    assert matrix.sum() == 2 * half * clients
    assert (matrix == matrix.T).all()
    assert not matrix.diagonal().any()
    assert matrix.sum(axis=1).min() >= half


@pytest.mark.parametrize("clients", [2, 3, 8, 25])
def test_gap_of_a_full_graph(clients: int) -> None:
    assert gap(Full(), clients) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("clients", [3, 4, 5, 12, 31])
def test_gap_of_a_ring(clients: int) -> None:
    expected = 1 - (1 + 2 * math.cos(2 * math.pi / clients)) / 3
    # 4 clients: (1 + 2 cos pi) / 3 = -1/3 and 1/3 are equally far from 0
    assert gap(Ring(), clients) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("clients", [3, 4, 10])
def test_gap_of_a_star(clients: int) -> None:
    # 1, 1/2 (values on the leaves alone, that sum to 0), and the rest of the trace: 1/n - 1/2
    assert gap(Star(), clients) == pytest.approx(0.5, abs=1e-12)


def test_gap_of_means_by_row() -> None:
    # Both others hear client 1, which hears none: 1, and 1/2 for each of the two.
    assert gap(Adjacency([[0, 1, 0], [0, 0, 0], [0, 1, 0]]), 3) == pytest.approx(0.5, abs=1e-12)


def test_gap_by_the_modulus() -> None:
    # Each hears the next: eigenvalues (1 + e^(2 pi i j / n)) / 2, of modulus cos(pi j / n).
    clients = 7
    cycle = [[int(j == (k + 1) % clients) for j in range(clients)] for k in range(clients)]
    expected = 1 - math.cos(math.pi / clients)
    assert gap(Adjacency(cycle), clients) == pytest.approx(expected, abs=1e-12)


def test_gap_of_a_bipartite_graph_counts_the_negative_end() -> None:
    # K_{m,m} with m = 9: eigenvalues 1, (1 - m) / (1 + m) = -0.8 and 1 / (1 + m) = 0.1.
    side = np.arange(18) % 2
    assert spectral_gap(side[:, None] != side) == pytest.approx(0.2, abs=1e-12)


def test_without_a_path_there_is_no_gap() -> None:
    for size in (3, 7, 10):  # some eigenvalues come out above 1
        halves = np.kron(np.eye(2), np.ones((size, size))) > 0
        np.fill_diagonal(halves, False)
        assert 0.0 <= spectral_gap(halves) < 1e-12
    assert spectral_gap(np.zeros((2, 2), dtype=np.bool_)) == 0.0
    assert gap(RandomRegular(1), 6) == pytest.approx(0.0, abs=1e-12)
    some = graph(Full(), 0, clients=5, seed=0, active=[0, 1, 3])
    assert spectral_gap(some) == pytest.approx(0.0, abs=1e-12)


def test_one_client_is_in_agreement() -> None:
    assert gap(Full(), 1) == 1.0


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 20), st.data(), seeds)
def test_gap_is_the_rate_of_agreement(clients: int, data: st.DataObject, seed: int) -> None:
    """Means over and over: the distance from agreement shrinks no slower than the gap says."""
    topology = TimeVarying(data.draw(st.integers(1, clients - 1)))
    matrix = graph(topology, 0, clients=clients, seed=seed)
    measured = spectral_gap(matrix)
    assert 0.0 <= measured <= 1.0
    mixing = matrix + np.eye(clients)
    mixing /= mixing.sum(axis=1, keepdims=True)
    spread = np.ptp(np.linalg.matrix_power(mixing, 400), axis=0).max()
    if measured > 0.1:
        assert spread < 1e-6
    if spread > 0.5:
        assert measured < 0.05


@pytest.mark.parametrize(
    ("topology", "heard", "gap"),
    [(Full(), (4, 4.0, 4), 1.0), (Ring(), (2, 2.0, 2), 0.460655), (Star(), (1, 1.6, 4), 0.5)],
)
def test_degrees_and_gap_of_five_clients(
    topology: object, heard: tuple[int, float, int], gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = summarise(topology, clients=5, seed=0)  # type: ignore[arg-type]
    named = dict(zip(("least_heard", "mean_heard", "most_heard"), heard, strict=True))
    assert found == {
        "class": type(topology).__name__,
        "spectral_gap": pytest.approx(gap, abs=1e-6),
        **named,
    }
    monkeypatch.setattr("lightfed.topology.topology.LARGEST", 4)
    many = summarise(topology, clients=5, seed=0)  # type: ignore[arg-type]
    assert many == {"class": type(topology).__name__, **named}
