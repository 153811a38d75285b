"""Weights of clients in a sum."""

from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

_LARGEST = 2**16  # small weights leave room for exact sums


def whole(weights: Mapping[int, float]) -> dict[int, int]:
    """Integer weights in the same proportions, so that sums do not depend on placement.

    They are rounded if exact proportions need numbers above 2^16. Weights are 0 or more, by client.
    """
    shares = {i: Fraction(repr(float(w))) for i, w in weights.items() if w > 0}
    if not shares:
        return dict.fromkeys(weights, 0)
    denominator = lcm(*(share.denominator for share in shares.values()))
    numerator = gcd(*(share.numerator for share in shares.values()))
    scale = min(Fraction(denominator, numerator), _LARGEST / max(shares.values()))
    return dict.fromkeys(weights, 0) | {i: max(1, round(x * scale)) for i, x in shares.items()}
