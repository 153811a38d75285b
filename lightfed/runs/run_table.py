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
    """A csv file with a column `round`, to which later rows can add other columns.

    The columns are in the order of their first appearance. A row without a value for a column has
    an empty cell.

    Args:
        path: The file, which is not written before there are rows.

    Attributes:
        columns: The columns of the rows so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = ["round"]

        # The columns that the file has; none before this object has written it.
        self._columns_of_file: list[str] = []

    def add_columns(self, *rows: Row) -> None:
        """Add the columns that rows have and the table does not have yet."""
        # Many rows have the same keys: each set of keys is looked at only once.
        for keys in dict.fromkeys(tuple(row) for row in rows):
            self.columns += [key for key in keys if key not in self.columns]

    def append(self, rows: Sequence[Row], before: Callable[[], Sequence[Row]]) -> None:
        """Append rows to the file, or write it anew if they have other columns.

        Args:
            rows: The new rows.
            before: Returns the rows that are in the file, if it has to be written anew.
        """
        self.add_columns(*rows)
        if self._columns_of_file != self.columns or not self.path.exists():
            self.write([*before(), *rows])
            return

        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(self._cells(rows))

    def write(self, rows: Sequence[Row]) -> None:
        """Replace the file by one with these rows."""
        self.add_columns(*rows)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(self.columns)
        writer.writerows(self._cells(rows))

        write_atomically(self.path, lambda file: file.write(text.getvalue().encode()))
        self._columns_of_file = list(self.columns)

    def _cells(self, rows: Sequence[Row]) -> list[list[float | int | str]]:
        """Return the cells of rows; csv.DictWriter would take four times as long."""
        return [[row.get(name, "") for name in self.columns] for row in rows]

    def rows(self) -> list[Row]:
        """Return the rows of the file; none if this object has not written it."""
        return read_rows(self.path) if self._columns_of_file else []


def read_rows(path: Path, rounds: int = sys.maxsize) -> list[Row]:
    """Read the complete rows of the first rounds from a table.

    A run that was killed can leave a part of a line at the end, which is skipped.

    Args:
        path: The table. Without a file there are no rows.
        rounds: The number of rounds; all by default.

    Raises:
        UserError: The file is damaged.
    """
    if not path.is_file():
        return []

    try:
        with path.open(newline="", encoding="utf-8") as file:
            text = file.read()
        # Without its end the last cell may be a part of a number, which looks like another number.
        whole_lines = text[: text.rfind("\n") + 1]
        rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(whole_lines, newline="")))

        # The cells that a line lacks are None.
        return [row for row in rows if None not in row.values() and int(row["round"]) <= rounds]
    except (csv.Error, LookupError, TypeError, ValueError) as error:
        raise UserError(
            key=str(path),
            found=f"it cannot be read ({reason(error)})",
            fix="repair it, or move it away to continue without its rows",
        ) from error
