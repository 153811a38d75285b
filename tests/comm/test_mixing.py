"""Weights between servers: what is read, and what is refused in one line with its numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightfed.topology.mixing import read_mixing
from lightfed.utils.errors import UserError

KEY = "model.algorithm.init_args.mixing"
RING = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]


def refusal(mixing: Any, servers: int) -> str:
    with pytest.raises(UserError) as told:
        read_mixing(mixing, servers, key=KEY)
    line = str(told.value)
    assert "\n" not in line
    assert line.startswith(f"{KEY}: ")
    return line.removeprefix(f"{KEY}: ")


def test_rows_and_files_say_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "ring.npy", np.array(RING, dtype=np.float32))
    np.savetxt(tmp_path / "ring.csv", RING, delimiter=",")
    (tmp_path / "one.csv").write_text("1\n")
    for mixing in (RING, str(tmp_path / "ring.npy"), str(tmp_path / "ring.csv")):
        found = read_mixing(mixing, 3, key=KEY)
        assert found.dtype == np.float64
        assert found.tolist() == RING
    assert read_mixing(str(tmp_path / "one.csv"), 1, key=KEY).tolist() == [[1.0]]
    assert read_mixing([[0, 1], [1, 0]], 2, key=KEY).tolist() == [[0.0, 1.0], [1.0, 0.0]]


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=5), st.data())
def test_means_of_permutations_are_doubly_stochastic(orders: Any, data: st.DataObject) -> None:
    """Birkhoff: and all such matrices are means of permutations."""
    shares = np.array([data.draw(st.floats(0.1, 1)) for _ in orders])
    eye = np.eye(4)
    matrix = sum(s * eye[list(o)] for s, o in zip(shares / shares.sum(), orders, strict=True))
    assert read_mixing(matrix.tolist(), 4, key=KEY).tolist() == matrix.tolist()


@pytest.mark.parametrize(
    ("mixing", "servers", "line"),
    [
        ([[0.5, 0.5], [0.5, 0.4]], 2, "not doubly stochastic: row 1 sums to 0.9; make all rows"),
        ([[0.5, 0.3, 0.2]] * 3, 3, "not doubly stochastic: column 0 sums to 1.5; make all rows"),
        ([[1 + 2e-6, 0], [0, 1]], 2, "not doubly stochastic: row 0 sums to 1.000002; make all"),
        ([[1.5, -0.5], [-0.5, 1.5]], 2, "an entry below 0 or not finite; give weights of 0 or"),
        ([[float("nan"), 1], [1, 0]], 2, "an entry below 0 or not finite; give weights of 0 or"),
        ([[float("inf"), 1], [1, 0]], 2, "an entry below 0 or not finite; give weights of 0 or"),
        (RING, 4, "of shape [3, 3] for 4 servers; give 4 rows of 4"),
        ([[0.5, 0.5, 0.0]] * 2, 2, "of shape [2, 3] for 2 servers; give 2 rows of 2"),
        ([[1.0]], 2, "of shape [1, 1] for 2 servers; give 2 rows of 2"),
        ([], 2, "of shape [0] for 2 servers; give 2 rows of 2"),
    ],
)
def test_no_doubly_stochastic_matrix(mixing: Any, servers: int, line: str) -> None:
    assert refusal(mixing, servers).startswith(line)


def test_rounding_is_allowed() -> None:
    third = [[0.3333333] * 3] * 3
    assert read_mixing(third, 3, key=KEY).tolist() == third


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.csv", None),
        ("words.csv", b"a,b\nc,d\n"),
        ("ragged.csv", b"1,0\n0\n"),
        ("empty.npy", b""),
        ("words.npy", b"1,0\n0,1\n"),
        ("binary.csv", bytes(range(128, 256))),
    ],
)
def test_a_file_that_cannot_be_read(name: str, content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = refusal(str(tmp_path / name), 2)
    assert line.startswith("it cannot be read (")
    assert line.endswith("); give rows of numbers")


def test_ragged_rows_cannot_be_read() -> None:
    assert refusal([[1.0], [0.5, 0.5]], 2).startswith("it cannot be read (")


def test_an_array_of_words_cannot_be_read(tmp_path: Path) -> None:
    np.save(tmp_path / "words.npy", np.array([["a", "b"], ["c", "d"]]))
    assert refusal(str(tmp_path / "words.npy"), 2).startswith("it cannot be read (")
