"""A user's weights between servers, read and checked."""

from pathlib import Path

import numpy as np

from lightfed.utils.errors import UserError


def read_mixing(mixing: list[list[float]] | str, servers: int, *, key: str) -> np.ndarray:
    """(N, N) float64, doubly stochastic.

    Args:
        mixing: rows, or the path of a .npy or .csv file.
        servers: N.
        key: of the configuration.

    Raises:
        UserError: it cannot be read, or is no doubly stochastic matrix of so many servers.
    """
    try:
        if isinstance(mixing, str):
            path = Path(mixing)
            matrix = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, delimiter=",")
        else:
            matrix = np.array(mixing, dtype=np.float64)
    except (OSError, ValueError) as error:
        raise UserError(key, f"it cannot be read ({error})", "give rows of numbers") from error
    if matrix.shape != (servers, servers):
        found = f"of shape {list(matrix.shape)} for {servers} servers"
        raise UserError(key, found, f"give {servers} rows of {servers}")
    if not (np.isfinite(matrix).all() and (matrix >= 0).all()):
        raise UserError(key, "an entry below 0 or not finite", "give weights of 0 or more")
    off = max(abs(matrix.sum(axis) - 1).max() for axis in (0, 1))
    if off > 1e-6:
        found = f"not doubly stochastic: a row or column sums to 1 +- {off:.2g}"
        raise UserError(key, found, "make all rows and columns sum to 1 (within 1e-6)")
    return matrix.astype(np.float64)
