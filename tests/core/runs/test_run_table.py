"""The tables of a run: what is read of a file that a killed run has left."""

from pathlib import Path

import pytest

from lightfed.runs.run_table import RunTable, read_rows
from lightfed.utils.errors import UserError

ROWS = [{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.9312}]


def written(folder: Path) -> Path:
    path = folder / "metrics.csv"
    RunTable(path).write(ROWS)
    return path


@pytest.mark.parametrize("missing", range(1, 9))
def test_a_line_without_its_end_is_no_row(tmp_path: Path, missing: int) -> None:
    """A cut within the last number would leave another number."""
    path = written(tmp_path)
    content = path.read_bytes()
    assert content.endswith(b"2,0.9312\r\n")

    path.write_bytes(content[: -1 - missing])

    assert [row["round"] for row in read_rows(path)] == ["1"]


def test_whole_rows_are_read_up_to_a_round(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert [row["accuracy"] for row in read_rows(path)] == ["0.5", "0.9312"]
    assert [row["accuracy"] for row in read_rows(path, rounds=1)] == ["0.5"]
    assert read_rows(tmp_path / "nothing.csv") == []


def test_a_row_with_a_new_column_writes_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    table = RunTable(path)
    table.write(ROWS)
    table.append([{"round": 3, "loss": 1.5}], lambda: ROWS)

    rows = read_rows(path)
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    assert [row["loss"] for row in rows] == ["", "", "1.5"]
    assert [row["accuracy"] for row in rows] == ["0.5", "0.9312", ""]


def test_a_damaged_table_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("round,accuracy\r\none,0.5\r\n")
    with pytest.raises(UserError, match=r"metrics\.csv"):
        read_rows(path)
