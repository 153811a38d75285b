"""Reads files of a run, of which csv files may still be growing; errors name the file."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
import yaml  # type: ignore[import-untyped]
from safetensors import SafetensorError

from lightfed.utils.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame

_OF_FORMATS = (zlib.error, BadZipFile, yaml.YAMLError, SafetensorError)
UNREADABLE = (OSError, KeyError, ValueError, EOFError, *_OF_FORMATS)
NAN = re.compile(r"(?<=,)nan(?=[,\r\n]|$)")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a UserError that names the file if it cannot be read."""
    try:
        yield
    except UNREADABLE as error:
        raise damaged(path, " ".join(str(error).split())) from error


def read_csv(path: Path, keys: Sequence[str] = ("round",)) -> tuple[DataFrame, bool]:
    """The complete lines of a csv file, and whether the last one is incomplete.

    All columns but `group` are numbers. An empty field is NaN, and `nan`, a value that was
    measured, is infinite. Without a line it has only the columns `keys`. A UserError if the file is
    damaged.
    """
    import pandas as pd

    text = path.read_bytes().decode("utf-8", "replace") if path.is_file() else ""
    lines, _, rest = text.rpartition("\n")
    if "\n" not in lines:  # no row yet
        return pd.DataFrame(columns=pd.Index(keys)), bool(rest)
    with reading(path):
        table = pd.read_csv(
            io.StringIO(NAN.sub("inf", lines)),
            dtype={"group": "str"},
            na_values=[""],
            keep_default_na=False,
        )
        texts = table.drop(columns="group", errors="ignore").select_dtypes(exclude="number")
        if len(texts.columns) or "round" not in table:
            raise ValueError(f"no numbers in column {[*texts, 'round'][0]}")
    return table, bool(rest)


def finite(table: DataFrame) -> DataFrame:
    return table.replace([np.inf, -np.inf], np.nan)


def damaged(path: Path, found: str) -> UserError:
    return UserError(
        "report", f"{path} cannot be read: {found}", "write the file again or remove it"
    )
