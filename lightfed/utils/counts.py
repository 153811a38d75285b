"""Rounding shares to whole numbers."""

from math import ceil, floor

import numpy as np

# Relative; far above the rounding error of a product of floats.
_ERROR = 1e-12


def rounded_up(product: float) -> int:
    """Return the ceiling without rounding error: .07 * 100 (7.000000000000001 in floats) is 7."""
    return ceil(product * (1 - _ERROR))


def rounded_down(product: float) -> int:
    """Return the floor without rounding error: .29 * 100 (28.999999999999996 in floats) is 29."""
    return floor(product * (1 + _ERROR))


def largest_remainder(shares: np.ndarray, total: int) -> np.ndarray:
    """Split a total into whole numbers proportional to shares, each within 1 of exact.

    Args:
        shares: The shares, (k,), of any sum.
        total: The sum of the result.

    Returns:
        (k,) int64.
    """
    exact = shares / shares.sum() * total
    counts = np.floor(exact).astype(np.int64)

    # What is left goes to those with the largest remainders, the first ones among equals.
    left = total - int(counts.sum())
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[:left]] += 1
    return counts
