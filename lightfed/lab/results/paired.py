"""Differences between two methods, seed by seed, and the 95 % interval of a paired t-test.

Two runs with the same seed have the same clients, data and draws. So the seeds' own spread cancels
in the difference, and the interval is that of the method's effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

if TYPE_CHECKING:
    from pandas import Series

Spread = TypeVar("Spread", float, "Series")
Verdict = Literal["better", "worse", "not shown", "identical runs"]

# The confidence level of intervals.
LEVEL = 0.95

# The power of `seeds_needed`: the share of repetitions in which they detect a difference.
POWER = 0.8

# A larger number of seeds is not named.
MOST = 1000


@dataclass(frozen=True)
class Difference:
    """The difference of a metric between a method and its rival.

    Attributes:
        seeds: The seeds for which both have a finite value, ascending.
        mean: The mean over the seeds of the method's value less the rival's; NaN without a seed.
        std: The sample deviation of these differences; NaN for fewer than two seeds.
    """

    seeds: tuple[int, ...]
    mean: float
    std: float

    @classmethod
    def of(cls, own: Mapping[int, float], rival: Mapping[int, float]) -> Difference:
        """Return the difference of the values of a method and of its rival, both by seed."""
        difference_of_seed = {}
        for seed in sorted(own.keys() & rival.keys()):
            difference = own[seed] - rival[seed]
            if math.isfinite(difference):
                difference_of_seed[seed] = difference

        mean, std = mean_and_std(list(difference_of_seed.values()))
        return cls(tuple(difference_of_seed), mean, std)

    @property
    def half(self) -> float:
        """Half of the interval; NaN for fewer than two seeds."""
        return t_half_width(self.std, len(self.seeds))

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half

    @property
    def is_nothing(self) -> bool:
        """Whether the method and its rival have the same value in every seed."""
        return len(self.seeds) > 0 and self.mean == 0 and not self.std > 0

    @property
    def p(self) -> float:
        """The two-sided p value of the paired t-test; NaN for fewer than two seeds.

        It is less than 5 % if the interval excludes 0.
        """
        from scipy.special import stdtr  # scipy.stats would take a second to import

        if not math.isfinite(self.std):
            return math.nan
        if self.std == 0:
            return 1.0 if self.mean == 0 else 0.0

        standard_error = self.std / math.sqrt(len(self.seeds))
        return 2 * float(stdtr(len(self.seeds) - 1, -abs(self.mean) / standard_error))

    def verdict(self, direction: int) -> Verdict:
        """Return whether the method is better: whether the interval excludes 0.

        Args:
            direction: 1 if high values are better, and -1 if low ones are.
        """
        worst, best = sorted((direction * self.low, direction * self.high))
        if worst > 0:
            return "better"
        if best < 0:
            return "worse"
        return "not shown"

    def excluded(
        self, direction: int, *, half: float | None = None
    ) -> tuple[float | None, float | None]:
        """Return the smallest gain and the smallest loss that the interval excludes.

        Args:
            direction: 1 if high values are better, and -1 if low ones are.
            half: Half of another interval than its own.

        Returns:
            The ends of the interval, as sizes: all gains above the first and all losses above the
            second are excluded. None where the end is on the other side of 0, or unknown.
        """
        half = self.half if half is None else half
        worst, best = sorted((direction * (self.mean - half), direction * (self.mean + half)))
        gain = best if best >= 0 else None
        loss = -worst if worst <= 0 else None
        return gain, loss

    def seeds_needed(self) -> int | None:
        """Return the number of seeds that detect a difference of this size and spread.

        They do so with the power `POWER`.

        Returns:
            The number. None if the difference is 0, if it would take more than `MOST` seeds, or if
            the spread is unknown.
        """
        if self.mean == 0 or not math.isfinite(self.mean) or not math.isfinite(self.std):
            return None

        counts = np.arange(2, MOST + 1)
        enough = counts[_standard_errors(counts) * self.std <= abs(self.mean) * np.sqrt(counts)]
        return int(enough[0]) if len(enough) else None

    def spread_detected(self, n: int) -> float:
        """Return the largest deviation over n seeds at which they detect this difference.

        They do so with the power `POWER`.
        """
        return abs(self.mean) * math.sqrt(n) / float(_standard_errors(n))


def _standard_errors(counts: Any) -> Any:
    """Return how many standard errors a difference needs to be detected by numbers of seeds."""
    from scipy.special import stdtrit  # scipy.stats would take a second to import

    return stdtrit(counts - 1, (1 + LEVEL) / 2) + stdtrit(counts - 1, POWER)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample deviation of the finite values.

    The mean is NaN without a value, and the deviation for fewer than two.
    """
    finite_values = np.array([value for value in values if math.isfinite(value)])
    mean = float(finite_values.mean()) if len(finite_values) > 0 else math.nan
    std = float(finite_values.std(ddof=1)) if len(finite_values) > 1 else math.nan
    return mean, std


def t_half_width(std: Spread, n: int) -> Spread:
    """Return half of the 95 % t interval of a mean of n values; NaN for fewer than two.

    Args:
        std: The sample deviation of the values.
        n: The number of values.
    """
    if n < 2:
        return std * math.nan
    from scipy.special import stdtrit  # even this takes a third of a second to import

    return std * (float(stdtrit(n - 1, (1 + LEVEL) / 2)) / math.sqrt(n))
