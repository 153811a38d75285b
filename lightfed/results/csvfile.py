"""Reads a csv file of a run, which may still be growing; errors name the line."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightfed.utils.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame


def read_csv(
    path: Path, *, keys: Sequence[str], text: Sequence[str] = ()
) -> tuple[DataFrame, bool]:
    """The complete lines of a csv file, and whether the last one is incomplete.

    The file must have the columns `keys`, which hold whole numbers unless named in `text`. In
    columns that are no `text` an empty field is NaN, and `nan`, a value that was measured, is
    infinite. A UserError if the file is damaged.
    """
    import pandas as pd

    lines, _, rest = path.read_bytes().decode("utf-8", "replace").rpartition("\n")
    head, *rows = csv.reader(io.StringIO(lines.replace("\r", ""))) if lines else [keys]
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            many = "more" if len(row) > len(head) else "fewer"
            raise damaged(path, f"line {number} has {many} fields than the first line")
    if missing := [name for name in keys if name not in head]:
        raise damaged(path, f"its first line has no column {missing[0]}")
    table = pd.DataFrame(rows, columns=pd.Index(head), dtype="str")
    numbers = table.drop(columns=[*text]).apply(pd.to_numeric, errors="coerce").astype("float64")
    numbers = numbers.mask(table[numbers.columns] == "nan", np.inf)
    wrong = numbers.isna() & (table[numbers.columns] != "")
    whole = [name for name in keys if name not in text]
    wrong[whole] = numbers[whole] % 1 != 0
    if wrong.any(axis=None):
        line, name = wrong.stack().idxmax()
        raise damaged(path, f"line {line + 2}, column {name}: {str(table.at[line, name])!r}")
    return table.assign(**numbers).astype(dict.fromkeys(whole, "int64")), bool(rest)


def finite(table: DataFrame) -> DataFrame:
    return table.replace([np.inf, -np.inf], np.nan)


def damaged(path: Path, found: str) -> UserError:
    return UserError(
        "report", f"{path} cannot be read: {found}", "write the file again or remove it"
    )
