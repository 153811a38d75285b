"""Graphs that a user wrote down: as lists, in a file, and what is no graph."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightfed.topology.topology import Adjacency, graph, hearing
from lightfed.utils.errors import UserError

KEY = "model.algorithm.init_args.topology.init_args.matrix"
CYCLE = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]  # each of three hears the next


def lists(topology: Adjacency, clients: int) -> list[list[int]]:
    """Whom each client hears."""
    topology.check(clients)
    return list(hearing(topology, 0, clients=clients, seed=0).values())


def test_the_rows_of_a_matrix_are_the_hearers() -> None:
    topology = Adjacency(CYCLE)
    assert lists(topology, 3) == [[1], [2], [0]]
    assert (
        graph(topology, 0, clients=3, seed=0).tolist() == np.array(CYCLE, dtype=np.bool_).tolist()
    )
    assert lists(Adjacency([[1, 1], [0, 1]]), 2) == [[1], []]  # the diagonal has no meaning


def test_a_matrix_lies_in_a_file(tmp_path: Path) -> None:
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
        ("empty.csv", b""),
        ("text.csv", b"a,b\nc,d\n"),
        ("ragged.csv", b"0,1\n1\n"),
        ("binary.csv", b"\xff\xfe\x00"),
        ("empty.npy", b""),
        ("text.npy", b"0,1\n1,0\n"),
    ],
)
def test_a_file_without_a_matrix_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{KEY}: .*{name} is no array of numbers; ") as error:
        Adjacency(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        np.array([["0", "1"], ["1", "0"]]),
        np.array([[0.0, np.nan], [1.0, 0.0]]),
        np.zeros((2, 2), dtype=[("hears", np.int8)]),
    ],
    ids=["text", "nan", "record"],
)
def test_a_file_of_other_values_is_refused(values: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "graph.npy", values)
    with pytest.raises(UserError, match="values other than 0 and 1"):
        Adjacency(str(tmp_path / "graph.npy"))


@pytest.mark.parametrize(
    ("fragment", "make"),
    [
        ("3 rows and columns, for 4 clients", lambda: lists(Adjacency(CYCLE), 4)),
        ("an array of shape (2, 3)", lambda: Adjacency([[0, 1, 0], [1, 0, 0]])),
        ("an array of shape (0,)", lambda: Adjacency([])),
        ("rows of different lengths", lambda: Adjacency([[0, 1], [1]])),
        ("values other than 0 and 1", lambda: Adjacency([[0, 2], [1, 0]])),
        ("gone.npy cannot be read (No such file", lambda: Adjacency("gone.npy")),
        ("graph.txt; give a .npy or .csv file", lambda: Adjacency("graph.txt")),
    ],
)
def test_what_is_no_graph_is_refused(fragment: str, make: Callable[[], object]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert error.value.key == KEY
    assert fragment in str(error.value)
