"""Files of measured delays."""

import math
from pathlib import Path

import numpy as np

from lightfed.utils.errors import UserError


def read_trace(path: Path, *, key: str) -> np.ndarray:
    """(n,) the delays of a file in its order, in virtual seconds.

    Args:
        path: a text file with one delay on each line.
        key: of the configuration, that named it.

    Raises:
        UserError: naming the file and the line of the first entry that is none.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(key, str(error), "name a text file with one delay on each line") from error
    if not lines:
        raise UserError(key, f"{path} is empty", "write one delay on each line")
    values = np.array([_entry(line) for line in lines])
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        number = int(wrong[0])
        text = lines[number].strip()
        found = (
            f"{path}, line {number + 1}: {text!r}" if text else f"{path}, line {number + 1}: empty"
        )
        raise UserError(key, found, "write a finite number of at least 0 on each line")
    if not values.any():
        raise UserError(key, f"all delays of {path} are 0", "write a number above 0")
    return values


def _entry(line: str) -> float:
    """NaN for what is no number."""
    try:
        return float(line)
    except ValueError:
        return math.nan
