"""Differences between two methods, seed by seed, and the 95 % interval of a paired t-test.

Two runs with the same seed have the same clients, data and draws. So the seeds' own spread cancels
in the difference, and the interval is that of the method's effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

if TYPE_CHECKING:
    from pandas import Series

Spread = TypeVar("Spread", float, "Series")
Verdict = Literal["better", "worse", "not shown"]
LEVEL = 0.95  # of intervals
POWER = 0.8  # share of repetitions in which `seeds_needed` show a difference
MOST = 1000  # seeds: more are not named


@dataclass(frozen=True)
class Difference:
    """Of a metric between a method and its rival.

    Attributes:
        seeds: those for which both have a finite value, ascending.
        mean: over the seeds, of the method's value less the rival's; NaN without a seed.
        std: sample deviation; NaN below two seeds.
    """

    seeds: tuple[int, ...]
    mean: float
    std: float

    @classmethod
    def of(cls, own: Mapping[int, float], rival: Mapping[int, float]) -> Difference:
        """Of values by seed."""
        both = {seed: own[seed] - rival[seed] for seed in sorted(own.keys() & rival.keys())}
        known = {seed: value for seed, value in both.items() if math.isfinite(value)}
        return cls(tuple(known), *mean_and_std([*known.values()]))

    @property
    def half(self) -> float:
        """Half the interval; NaN below two seeds."""
        return t_half_width(self.std, len(self.seeds))

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def verdict(self, direction: int) -> Verdict:
        """Whether the method is better, where `direction` is 1 if high values are, else -1."""
        worst, best = sorted((direction * self.low, direction * self.high))
        return "better" if worst > 0 else "worse" if best < 0 else "not shown"

    def seeds_needed(self) -> int | None:
        """How many seeds show a difference of this size and spread, four times out of five.

        None if it is 0, would take more than MOST, or the spread is not known.
        """
        from scipy.special import stdtrit

        if not (self.mean and math.isfinite(self.std)):
            return None
        n = np.arange(2, MOST + 1)
        ends = stdtrit(n - 1, (1 + LEVEL) / 2) + stdtrit(n - 1, POWER)
        enough = n[ends * self.std <= abs(self.mean) * np.sqrt(n)]
        return int(enough[0]) if len(enough) else None

    def spread_detected(self, n: int) -> float:
        """The largest deviation over n seeds at which they detect a difference of this size.

        With the power of `seeds_needed`.
        """
        from scipy.special import stdtrit

        ends = float(stdtrit(n - 1, (1 + LEVEL) / 2) + stdtrit(n - 1, POWER))
        return abs(self.mean) * math.sqrt(n) / ends


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Of the finite values; the sample deviation is NaN below two of them."""
    known = np.array([value for value in values if math.isfinite(value)])
    mean = float(known.mean()) if len(known) else math.nan
    return mean, float(known.std(ddof=1)) if len(known) > 1 else math.nan


def t_half_width(std: Spread, n: int) -> Spread:
    """Half the 95 % t interval of a mean of n values with this sample deviation; NaN below two."""
    from scipy.special import stdtrit  # scipy.stats would take a second to import

    return std * (float(stdtrit(n - 1, (1 + LEVEL) / 2)) / math.sqrt(n) if n > 1 else math.nan)
