"""The csv tables of a run: metrics.csv, clients.csv and timings.csv."""

import csv
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import UserError, reason

Row = dict[str, float | int | str]


class RunTable:
    """A csv file, not written yet, with a column `round`; later rows may add others.

    Columns are in order of their first appearance; a row without one has an empty cell.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = ["round"]
        self._written: list[str] = []  # columns of the file

    def add_columns(self, *rows: Row) -> None:
        """Add the columns of rows that are new."""
        for keys in dict.fromkeys(tuple(row) for row in rows):
            self.columns += [key for key in keys if key not in self.columns]

    def append(self, rows: Sequence[Row], before: Callable[[], Sequence[Row]]) -> None:
        """Append rows; if there are new columns, write the whole file, with those `before`."""
        self.add_columns(*rows)
        if self._written != self.columns or not self.path.exists():
            self.write([*before(), *rows])
            return
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows(self._cells(rows))

    def write(self, rows: Sequence[Row]) -> None:
        """Replace the file."""
        self.add_columns(*rows)
        text = io.StringIO()
        csv.writer(text).writerows([self.columns, *self._cells(rows)])
        self._written = list(self.columns)
        write_atomically(self.path, lambda file: file.write(text.getvalue().encode()))

    def _cells(self, rows: Sequence[Row]) -> list[list[float | int | str]]:
        """The cells of rows; csv.DictWriter takes four times as long."""
        return [[row.get(name, "") for name in self.columns] for row in rows]

    def rows(self) -> list[Row]:
        """The rows that this object has written; empty if it has not written the file."""
        return read_rows(self.path) if self._written else []


def read_rows(path: Path, rounds: int = sys.maxsize) -> list[Row]:
    """Complete rows of the first `rounds` rounds; empty if there is no file.

    The truncated last line of a killed run is dropped. A UserError if the file is damaged.
    """
    if not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
        return [row for row in rows if None not in row.values() and int(row["round"]) <= rounds]
    except (csv.Error, LookupError, TypeError, ValueError) as error:
        fix = "repair it, or move it away to continue without its rows"
        raise UserError(str(path), f"it cannot be read ({reason(error)})", fix) from error
