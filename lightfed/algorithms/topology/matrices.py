"""Adjacency and mixing matrices that the user gives, as lists or in a file."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightfed.utils.errors import UserError

# The largest deviation of a sum of weights from 1.
_TOLERANCE = 1e-6


def read_adjacency(matrix: Sequence[Sequence[int]] | str, *, key: str) -> np.ndarray:
    """Return an adjacency matrix, (K, K) bool, whose diagonal is False.

    Args:
        matrix: K rows of K zeros and ones, or the path of a .npy or .csv file with them.
        key: The configuration key that errors name.

    Raises:
        UserError: It cannot be read, or is not a square matrix of zeros and ones.
    """
    values = _read(matrix, key)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise UserError(
            key, f"an array of shape {values.shape}", "give a row and a column for each client"
        )
    if not np.isin(values, (0, 1)).all():
        raise UserError(key, "values other than 0 and 1", "write 1 where one receives from another")

    adjacency = values.astype(np.bool_)
    np.fill_diagonal(adjacency, False)
    return adjacency


def read_mixing(
    mixing: Sequence[Sequence[float]] | str, servers: int, *, key: str, wait: int | None = None
) -> np.ndarray:
    """Return a doubly stochastic matrix, (N, N) float64.

    Args:
        mixing: N rows of N weights, or the path of a .npy or .csv file with them.
        servers: N.
        key: The configuration key that errors name.
        wait: Number of servers that a round waits for; all by default.

    Raises:
        UserError: It cannot be read, is not a doubly stochastic matrix of this many servers, or not
            all servers take part in every round.
    """
    if wait is not None and wait != servers:
        raise UserError(
            key,
            f"given, and wait: {wait} of {servers} servers",
            "leave one out: such servers all take part in every round",
        )

    matrix = _read(mixing, key)
    if matrix.shape != (servers, servers):
        raise UserError(
            key,
            f"of shape {list(matrix.shape)} for {servers} servers",
            f"give {servers} rows of {servers}",
        )

    is_weight = (matrix >= 0) & (matrix < np.inf)  # False for NaN
    if not is_weight.all():
        raise UserError(key, "an entry below 0 or not finite", "give weights of 0 or more")

    for line, sums in (("row", matrix.sum(1)), ("column", matrix.sum(0))):
        worst = int(abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > _TOLERANCE:
            raise UserError(
                key,
                f"not doubly stochastic: {line} {worst} sums to {sums[worst]:.9g}",
                f"make all rows and columns sum to 1 (within {_TOLERANCE:g})",
            )
    return matrix


def count_edges(mixing: np.ndarray) -> int:
    """Return the number of messages in a round: that of the weights besides the diagonal."""
    own_weights = np.diag(np.diag(mixing))
    return int(np.count_nonzero(mixing - own_weights))


def _read(source: Sequence[Sequence[float]] | str, key: str) -> np.ndarray:
    """Return a float64 array of any shape from lists or a file.

    Raises:
        UserError: There are no numbers.
    """
    try:
        if not isinstance(source, str):
            return np.array(source, dtype=np.float64)
        if Path(source).suffix == ".npy":
            return np.asarray(np.load(source, allow_pickle=False), dtype=np.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy only warns about a file without numbers
            return np.loadtxt(source, delimiter=",", ndmin=2)
    except (OSError, EOFError, TypeError, ValueError, UserWarning) as error:
        fix = "give rows of numbers, or a .npy or .csv file of them"
        raise UserError(key, f"it cannot be read ({error})", fix) from error
