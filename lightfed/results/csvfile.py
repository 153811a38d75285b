"""Reads a csv file of a run, which may still be growing; errors name the line."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightfed.utils.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame

_END = "."  # a column appended to every line: pandas would fill up lines that are cut


def read_csv(
    path: Path, *, keys: Sequence[str], text: Sequence[str] = ()
) -> tuple[DataFrame, bool]:
    """The complete lines of a csv file, and whether the last one is incomplete.

    The file must have the columns `keys`, which hold whole numbers unless named in `text`. In
    columns that are no `text` an empty field is NaN, and `nan`, a value that was measured, is
    infinite. A UserError if the file is damaged.
    """
    import pandas as pd

    lines, end, rest = path.read_bytes().decode("utf-8", "replace").rpartition("\n")
    if not end:
        return pd.DataFrame(columns=pd.Index(keys)), bool(rest)
    guarded = f"{lines}\n".replace("\r", "").replace("\n", f",{_END}\n")
    try:
        table = pd.read_csv(
            io.StringIO(guarded), dtype="str", keep_default_na=False, skip_blank_lines=False
        )
    except pd.errors.ParserError as error:
        line = re.search(r"line (\d+)|row (\d+)", str(error))
        where = f"line {line[1] or line[2]}" if line else "it"
        raise damaged(path, f"{where} has more fields than the first line") from error
    if missing := [name for name in keys if name not in table]:
        raise damaged(path, f"its first line has no column {missing[0]}")
    if not isinstance(table.index, pd.RangeIndex):
        raise damaged(path, "line 2 has more fields than the first line")
    if (short := table[_END] != _END).any():
        raise damaged(path, f"line {short.argmax() + 2} has fewer fields than the first line")
    numbers = table.drop(columns=[_END, *text]).apply(pd.to_numeric, errors="coerce")
    numbers = numbers.astype("float64")
    numbers = numbers.mask(table[numbers.columns] == "nan", np.inf)
    wrong = numbers.isna() & (table[numbers.columns] != "")
    whole = [name for name in keys if name not in text]
    wrong[whole] = numbers[whole] % 1 != 0
    if wrong.any(axis=None):
        line, name = wrong.stack().idxmax()
        raise damaged(path, f"line {line + 2}, column {name}: {str(table.at[line, name])!r}")
    found = table.drop(columns=_END).assign(**numbers)
    return found.astype(dict.fromkeys(whole, "int64")), bool(rest)


def finite(table: DataFrame) -> DataFrame:
    return table.replace([np.inf, -np.inf], np.nan)


def damaged(path: Path, found: str) -> UserError:
    return UserError(
        "report", f"{path} cannot be read: {found}", "write the file again or remove it"
    )
