"""A user's weights between servers, read and checked."""

from pathlib import Path

import numpy as np

from lightfed.utils.errors import UserError

_OFF = 1e-6  # from 1, of a sum of weights


def read_mixing(
    mixing: list[list[float]] | str, servers: int, *, key: str, wait: int | None = None
) -> np.ndarray:
    """(N, N) float64, doubly stochastic.

    Args:
        mixing: rows, or the path of a .npy or .csv file.
        servers: N.
        key: of the configuration.
        wait: servers that a round waits for; all by default.

    Raises:
        UserError: it cannot be read, or is no doubly stochastic matrix of so many servers, or not
            all of them take part in every round.
    """
    if wait is not None and wait != servers:
        found = f"given, and wait: {wait} of {servers} servers"
        fix = "leave one out: such servers all take part in every round"
        raise UserError(key, found, fix)
    try:
        if isinstance(mixing, str):
            path = Path(mixing)
            read = (
                np.load(path) if path.suffix == ".npy" else np.loadtxt(path, delimiter=",", ndmin=2)
            )
            matrix = np.array(read, dtype=np.float64)
        else:
            matrix = np.array(mixing, dtype=np.float64)
    except (OSError, EOFError, TypeError, ValueError) as error:
        raise UserError(key, f"it cannot be read ({error})", "give rows of numbers") from error
    if matrix.shape != (servers, servers):
        found = f"of shape {list(matrix.shape)} for {servers} servers"
        raise UserError(key, found, f"give {servers} rows of {servers}")
    if not (np.isfinite(matrix).all() and (matrix >= 0).all()):
        raise UserError(key, "an entry below 0 or not finite", "give weights of 0 or more")
    for line, sums in (("row", matrix.sum(1)), ("column", matrix.sum(0))):
        worst = int(abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > _OFF:
            found = f"not doubly stochastic: {line} {worst} sums to {sums[worst]:.9g}"
            raise UserError(key, found, f"make all rows and columns sum to 1 (within {_OFF:g})")
    return matrix
