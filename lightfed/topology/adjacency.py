"""A graph that a user wrote down, as lists or in a file."""

import warnings
from pathlib import Path

import numpy as np

from lightfed.utils.errors import UserError


def read_adjacency(matrix: list[list[int]] | str, *, key: str) -> np.ndarray:
    """(K, K) bool, without a diagonal.

    Args:
        matrix: K rows of K zeros and ones, or the path of a .npy or .csv file with them.
        key: of the configuration, that an error names.

    Raises:
        UserError: that is no square of zeros and ones.
    """
    values = _read(Path(matrix), key) if isinstance(matrix, str) else _from_lists(matrix, key)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise _not_square(key, f"an array of shape {values.shape}")
    if values.dtype.kind not in "biuf" or not ((values == 0) | (values == 1)).all():
        raise UserError(key, "values other than 0 and 1", "write 1 where one hears another")
    heard = values.astype(np.bool_)
    np.fill_diagonal(heard, False)
    return heard


def _not_square(key: str, found: str) -> UserError:
    return UserError(key, found, "give a row and a column for each client")


def _from_lists(matrix: list[list[int]], key: str) -> np.ndarray:
    try:
        return np.array(matrix)
    except ValueError as error:
        raise _not_square(key, "rows of different lengths") from error


def _read(path: Path, key: str) -> np.ndarray:
    """The array in a file, of whatever shape and type."""
    if path.suffix not in (".npy", ".csv"):
        raise UserError(key, f"{path}", "give a .npy or .csv file, or lists")
    try:
        if path.suffix == ".npy":
            return np.asarray(np.load(path, allow_pickle=False))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a file without numbers numpy only warns
            return np.loadtxt(path, delimiter=",", ndmin=2)
    except OSError as error:
        found = f"{path} cannot be read ({error.strerror})"
        raise UserError(key, found, "give a file that can") from error
    except (ValueError, EOFError, UserWarning) as error:
        found = f"{path} is no array of numbers"
        raise UserError(key, found, "write K rows of K zeros and ones") from error
