"""Adjacency and mixing matrices given by the user, as lists or in a file."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightfed.utils.errors import UserError, require

_OFF = 1e-6  # largest deviation of a sum of weights from 1


def read_adjacency(matrix: Sequence[Sequence[int]] | str, *, key: str) -> np.ndarray:
    """(K, K) bool, without a diagonal.

    Args:
        matrix: K rows of K zeros and ones, or the path of a .npy or .csv file with them.
        key: configuration key for errors.

    Raises:
        UserError: it cannot be read, or is not a square matrix of zeros and ones.
    """
    values = _read(matrix, key)
    square = values.ndim == 2 and values.shape[0] == values.shape[1]
    found = f"an array of shape {values.shape}"
    require(square, key, found, "give a row and a column for each client")
    fix = "write 1 where one receives from another"
    require(bool(np.isin(values, (0, 1)).all()), key, "values other than 0 and 1", fix)
    adjacency = values.astype(np.bool_)
    np.fill_diagonal(adjacency, False)
    return adjacency


def read_mixing(
    mixing: Sequence[Sequence[float]] | str, servers: int, *, key: str, wait: int | None = None
) -> np.ndarray:
    """(N, N) float64, doubly stochastic.

    Args:
        mixing: N rows of N weights, or the path of a .npy or .csv file with them.
        servers: N.
        key: configuration key for errors.
        wait: number of servers that a round waits for; all by default.

    Raises:
        UserError: it cannot be read, is not a doubly stochastic matrix of this many servers, or not
            all servers take part in every round.
    """
    found = f"given, and wait: {wait} of {servers} servers"
    fix = "leave one out: such servers all take part in every round"
    require(wait in (None, servers), key, found, fix)
    matrix = _read(mixing, key)
    found = f"of shape {list(matrix.shape)} for {servers} servers"
    require(matrix.shape == (servers, servers), key, found, f"give {servers} rows of {servers}")
    finite = bool(((matrix >= 0) & (matrix < np.inf)).all())
    require(finite, key, "an entry below 0 or not finite", "give weights of 0 or more")
    for line, sums in (("row", matrix.sum(1)), ("column", matrix.sum(0))):
        worst = int(abs(sums - 1).argmax())
        found = f"not doubly stochastic: {line} {worst} sums to {sums[worst]:.9g}"
        fix = f"make all rows and columns sum to 1 (within {_OFF:g})"
        require(abs(sums[worst] - 1) <= _OFF, key, found, fix)
    return matrix


def count_edges(mixing: np.ndarray) -> int:
    """Number of messages in a round: the weights that are not 0, without the diagonal."""
    return int(np.count_nonzero(mixing - np.diag(np.diag(mixing))))


def _read(source: Sequence[Sequence[float]] | str, key: str) -> np.ndarray:
    """Read a float64 array of any shape."""
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
