"""Integrals over one variable, by Gauss and Legendre's rule on more and more equal panels."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Function = Callable[[np.ndarray], np.ndarray]
"""Values at points of any shape, of that shape."""

_LOG_GRID = np.arange(-745.0, 700.0, 0.25)  # logarithms of all positive numbers, nearly
_NEGLIGIBLE = 1e-18  # of the largest value of an integrand
_NODES = 16  # in a panel
_MOST_PANELS = 4096
_CONVERGED = 1e-14  # relative change from which more panels add rounding errors alone


class Integral(NamedTuple):
    """A number and how far it may be off: what the last doubling of the panels changed."""

    value: float
    error: float


def integrate(function: Function, low: float, high: float) -> Integral:
    """The integral of a function that is smooth between two bounds."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    panels, before = 16, math.inf
    while True:
        half = (high - low) / panels / 2
        middles = low + half * (2 * np.arange(panels) + 1)
        value = half * float((function(middles[:, None] + half * nodes) @ weights).sum())
        error = abs(value - before)
        if error <= _CONVERGED * abs(value) or panels == _MOST_PANELS:
            return Integral(value, error)
        panels, before = 2 * panels, value


def integrate_positive(function: Function, *, scale: float) -> Integral:
    """The integral of f(t) over all t > 0.

    Args:
        function: f, nonnegative, bounded, smooth in log t, that vanishes as t grows.
        scale: a t of the order of those that matter, within hundreds of powers of e.
    """

    def over_logarithms(s: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            return function(scale * np.exp(s)) * np.exp(s)

    values = over_logarithms(_LOG_GRID)
    inside = np.flatnonzero(values > _NEGLIGIBLE * values.max())
    first, last = max(inside[0] - 1, 0), min(inside[-1] + 1, len(values) - 1)
    found = integrate(over_logarithms, float(_LOG_GRID[first]), float(_LOG_GRID[last]))
    return Integral(scale * found.value, scale * found.error)
