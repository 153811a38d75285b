"""Weights of clients in a sum."""

from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

# Small weights leave room in a float64 for sums without rounding.
_LARGEST = 2**16


def whole(weights: Mapping[int, float]) -> dict[int, int]:
    """Return whole weights in the same proportions, for sums that do not depend on their order.

    Proportions that would need a weight above 2^16 are rounded. A weight above 0 stays above 0.

    Args:
        weights: The weight of each client, 0 or more.
    """
    # The decimal number that is printed, not the binary one: 0.1 is 1 / 10.
    exact = {
        client: Fraction(repr(float(weight))) for client, weight in weights.items() if weight > 0
    }
    if not exact:
        return dict.fromkeys(weights, 0)

    # The smallest factor that makes all of them whole, unless the largest would get too large.
    denominator = lcm(*(weight.denominator for weight in exact.values()))
    numerator = gcd(*(weight.numerator for weight in exact.values()))
    scale = min(Fraction(denominator, numerator), _LARGEST / max(exact.values()))

    whole_weights = dict.fromkeys(weights, 0)
    for client, weight in exact.items():
        whole_weights[client] = max(1, round(weight * scale))
    return whole_weights
