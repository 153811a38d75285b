"""Rounding shares to whole numbers."""

from math import ceil, floor

import numpy as np

_ERROR = 1e-12  # relative; far above the rounding error of a product of floats


def rounded_up(product: float) -> int:
    """Ceiling that ignores rounding error: .07 * 100 (7.000000000000001 in floats) gives 7."""
    return ceil(product * (1 - _ERROR))


def rounded_down(product: float) -> int:
    """Floor that ignores rounding error: .29 * 100 (28.999999999999996 in floats) gives 29."""
    return floor(product * (1 + _ERROR))


def largest_remainder(shares: np.ndarray, total: int) -> np.ndarray:
    """Split total into whole numbers proportional to shares (k,), each within 1 of exact."""
    exact = shares / shares.sum() * total
    counts = np.floor(exact).astype(np.int64)
    rest = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    return counts
