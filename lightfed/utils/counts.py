"""Whole numbers that are a share of others."""

from math import ceil, floor

import numpy as np

_ERROR = 1e-12  # of a product of floats, relative, and far more than it can be


def rounded_up(product: float) -> int:
    """Its ceiling, where .07 * 100, 7.000000000000001 in floats, is 7."""
    return ceil(product * (1 - _ERROR))


def rounded_down(product: float) -> int:
    """Its floor, where .29 * 100, 28.999999999999996 in floats, is 29."""
    return floor(product * (1 + _ERROR))


def largest_remainder(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to shares (k,) that sum to total, each within one of exact."""
    exact = shares / shares.sum() * total
    counts = np.floor(exact).astype(np.int64)
    rest = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    return counts
