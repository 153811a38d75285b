"""Rows of a csv file that may still be growing, and errors that name the line."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from lightfed.utils.errors import UserError


class CsvRows:
    """The complete rows of a csv file, each a dict of its fields.

    Attributes:
        header: the column names.
        cut: whether the file ends in the middle of a line; known after the last row.
    """

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path = path
        self.cut = False
        self._reader = csv.reader(self._finished(file))
        self.header = next(self._reader, [])

    def require(self, columns: tuple[str, ...]) -> None:
        missing = [name for name in columns if name not in self.header]
        if missing and not (self.cut and not self.header):
            raise damaged(self._path, f"its first line has no column {missing[0]}")

    def __iter__(self) -> Iterator[dict[str, str]]:
        try:
            for fields in self._reader:
                yield self._named(fields)
        except csv.Error as error:
            raise damaged(self._path, f"line {self._reader.line_num}: {error}") from error

    def whole(self, row: dict[str, str], column: str) -> int:
        value = self.number(row, column)
        if not value.is_integer():
            raise self._bad_field(row, column)
        return int(value)

    def number(self, row: dict[str, str], column: str) -> float:
        """The field as a float, NaN where it is empty."""
        try:
            return float(row[column] or "nan")
        except ValueError as error:
            raise self._bad_field(row, column) from error

    def _named(self, fields: list[str]) -> dict[str, str]:
        if len(fields) != len(self.header):
            found = f"{len(fields)} fields, but the first line has {len(self.header)}"
            raise damaged(self._path, f"line {self._reader.line_num} has {found}")
        return dict(zip(self.header, fields, strict=True))

    def _bad_field(self, row: dict[str, str], column: str) -> UserError:
        return damaged(
            self._path, f"line {self._reader.line_num}, column {column}: {row[column]!r}"
        )

    def _finished(self, file: TextIO) -> Iterator[str]:
        for line in file:
            if not line.endswith("\n"):
                self.cut = True
                return
            yield line


def damaged(path: Path, found: str) -> UserError:
    return UserError(
        "report", f"{path} cannot be read: {found}", "write the file again or remove it"
    )
