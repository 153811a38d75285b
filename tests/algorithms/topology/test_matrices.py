"""Matrices given by a user, as lists or in a file, and their errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.algorithms.topology.matrices import read_mixing
from lightfed.algorithms.topology.topology import Adjacency, round_senders
from lightfed.utils.errors import UserError

GRAPH = "model.algorithm.init_args.topology.init_args.matrix"
MIXING = "model.algorithm.init_args.mixing"
CYCLE = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]  # each of three hears the next
RING = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]


def lists(topology: Adjacency, clients: int) -> list[list[int]]:
    """Whom each client hears."""
    topology.check(clients)
    return list(round_senders(topology, 0, clients=clients, seed=0).values())


def weights(mixing: Any, servers: int) -> np.ndarray:
    return read_mixing(mixing, servers, key=MIXING)


def test_the_rows_of_a_matrix_are_the_hearers() -> None:
    topology = Adjacency(CYCLE)
    assert lists(topology, 3) == [[1], [2], [0]]
    assert lists(Adjacency([[1, 1], [0, 1]]), 2) == [[1], []]  # the diagonal has no meaning


def test_a_matrix_can_be_read_from_a_file(tmp_path: Path) -> None:
    values = np.array(CYCLE)
    for dtype in (np.bool_, np.int8, np.float32):
        np.save(tmp_path / "graph.npy", values.astype(dtype))
        assert lists(Adjacency(str(tmp_path / "graph.npy")), 3) == [[1], [2], [0]]
    (tmp_path / "graph.csv").write_text("0,1,0\n0,0,1\n1,0,0\n")
    assert lists(Adjacency(str(tmp_path / "graph.csv")), 3) == [[1], [2], [0]]
    (tmp_path / "one.csv").write_text("0\n")
    assert lists(Adjacency(str(tmp_path / "one.csv")), 1) == [[]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.npy", None),
        ("graph.txt", None),
        ("empty.csv", b""),
        ("text.csv", b"a,b\nc,d\n"),
        ("ragged.csv", b"0,1\n1\n"),
        ("binary.csv", b"\xff\xfe\x00"),
        ("empty.npy", b""),
        ("text.npy", b"0,1\n1,0\n"),
    ],
)
def test_a_file_without_a_matrix_is_refused(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    for key, read in ((GRAPH, Adjacency), (MIXING, lambda given: weights(given, 2))):
        with pytest.raises(UserError, match="it cannot be read") as error:
            read(str(path))
        assert error.value.key == key
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values", [[["a", "b"], ["c", "d"]], [[0.0, np.nan], [1.0, 0.0]]], ids=["text", "nan"]
)
def test_a_file_of_other_values_is_refused(values: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "matrix.npy", np.array(values))
    for read in (Adjacency, lambda given: weights(given, 2)):
        with pytest.raises(UserError):
            read(str(tmp_path / "matrix.npy"))


@pytest.mark.parametrize(
    ("fragment", "make"),
    [
        ("3 rows and columns, for 4 clients", lambda: lists(Adjacency(CYCLE), 4)),
        ("an array of shape (2, 3)", lambda: Adjacency([[0, 1, 0], [1, 0, 0]])),
        ("an array of shape (0,)", lambda: Adjacency([])),
        ("it cannot be read", lambda: Adjacency([[0, 1], [1]])),
        ("values other than 0 and 1", lambda: Adjacency([[0, 2], [1, 0]])),
    ],
)
def test_other_matrices_are_refused(fragment: str, make: Callable[[], object]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert error.value.key == GRAPH
    assert fragment in error.value.found


def test_rows_and_files_say_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "ring.npy", np.array(RING, dtype=np.float32))
    np.savetxt(tmp_path / "ring.csv", RING, delimiter=",")
    (tmp_path / "one.csv").write_text("1\n")
    for mixing in (RING, str(tmp_path / "ring.npy"), str(tmp_path / "ring.csv")):
        found = weights(mixing, 3)
        assert found.dtype == np.float64
        assert found.tolist() == RING
    assert weights(str(tmp_path / "one.csv"), 1).tolist() == [[1.0]]
    assert weights([[0, 1], [1, 0]], 2).tolist() == [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("mixing", "servers", "line"),
    [
        ([[0.5, 0.5], [0.5, 0.4]], 2, "not doubly stochastic: row 1 sums to 0.9"),
        ([[0.5, 0.3, 0.2]] * 3, 3, "not doubly stochastic: column 0 sums to 1.5"),
        ([[1 + 2e-6, 0], [0, 1]], 2, "not doubly stochastic: row 0 sums to 1.000002"),
        ([[1.5, -0.5], [-0.5, 1.5]], 2, "an entry below 0 or not finite"),
        ([[float("nan"), 1], [1, 0]], 2, "an entry below 0 or not finite"),
        (RING, 4, "of shape [3, 3] for 4 servers"),
        ([[0.5, 0.5, 0.0]] * 2, 2, "of shape [2, 3] for 2 servers"),
        ([], 2, "of shape [0] for 2 servers"),
        ([[1.0], [0.5, 0.5]], 2, "it cannot be read"),
    ],
)
def test_no_doubly_stochastic_matrix(mixing: Any, servers: int, line: str) -> None:
    with pytest.raises(UserError) as error:
        weights(mixing, servers)
    assert error.value.key == MIXING
    assert line in error.value.found


def test_rounding_is_allowed() -> None:
    third = [[0.3333333] * 3] * 3
    assert weights(third, 3).tolist() == third
