"""A paired comparison that ends as soon as it is decided: a group-sequential t-test.

The differences of the seeds are looked at a few times, after numbers of seeds that are fixed in
advance. To look five times at 5 % each would show a difference where there is none in 14 of 100
comparisons. So every look may spend only a part of the 5 % (alpha spending: K. K. G. Lan, D. L.
DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70 (1983) 659-663).

The usual boundaries take the statistic for a normal one. With a t of few degrees of freedom they
spend up to 6 % instead of 5 %, even if each is turned into a p value of that t. Here they are
those of the t statistics themselves, by numerical integration from look to look (P. Armitage, C. K.
McPherson, B. C. Rowe, "Repeated significance tests on accumulating data", JRSS A 132 (1969)
235-244; for t: C. Jennison, B. W. Turnbull, "Exact calculations for sequential t, chi-square and F
tests", Biometrika 78 (1991) 133-141). `null_step` says why one dimension is enough.

A comparison also ends if it is unlikely to show a difference by the last look. The boundaries do
not count on that, so it is not binding: who goes on nevertheless keeps the 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightfed.lab.results.holm import ERROR
from lightfed.lab.results.paired import POWER, Difference, mean_and_std

Numbers = NDArray[np.float64]

# By the seeds of the first look, as shares of all: 5, 8, 12, 16 and 20 of 20.
SHARES = (0.25, 0.4, 0.6, 0.8, 1.0)

# The usual first look has no fewer seeds.
FEWEST = 3

# Below this predictive probability of a difference at the last look, a comparison is given up.
FUTILITY = 0.2

# The angles between 0 and pi are divided into so many equal bins. A difference moves an angle to
# the center of a bin, an error that grows with the square of its width. So what is wanted is found
# with both numbers, and extrapolated to bins without a width. Up to 100 seeds the level is right to
# one part in a hundred.
_BINS = (250, 500)

# Levels are not told apart below this one.
_LOWEST = 1e-6

# Simulated comparisons, of which a stated power is the mean: it is off by one point or less.
_REPETITIONS = 5_000


# What may be spent.


def obrien_fleming(level: float, share: Numbers) -> Numbers:
    """Return what is spent at shares of all seeds: little early, nearly all at the end.

    The boundaries are like those of O'Brien and Fleming (1979).

    Args:
        level: The level of the two-sided test; each side spends one half of it.
        share: The seeds of each look, as a share of all.
    """
    from scipy.special import ndtr, ndtri

    of_one_side = 2 * ndtr(ndtri(level / 4) / np.sqrt(share))
    return np.asarray(2 * of_one_side)


def pocock(level: float, share: Numbers) -> Numbers:
    """Return what is spent at shares of all seeds: much from the first look on.

    The boundaries are like those of Pocock (1977), which are about the same at each look.

    Args:
        level: The level of the two-sided test.
        share: The seeds of each look, as a share of all.
    """
    return np.asarray(level * np.log1p((math.e - 1) * share))


SPENDING: dict[str, Callable[[float, Numbers], Numbers]] = {
    "Pocock": pocock,
    "O'Brien-Fleming": obrien_fleming,
}


# The null distribution.

# Let x_1, ..., x_n be differences without a mean effect, and W_n = sum(x) / sqrt(n sum(x^2)), the
# cosine of the angle between x and (1, ..., 1). It says the same as t:
# t = W sqrt(n - 1) / sqrt(1 - W^2). All that follows is in the angle, whose distribution is smooth
# from two seeds on.


def _edges(bins: int) -> Numbers:
    """Return the edges of the bins, ascending."""
    return np.linspace(0.0, math.pi, bins + 1)


def _extrapolated(coarse: Numbers, fine: Numbers) -> Numbers:
    """Return what values from both numbers of bins would be for bins without a width."""
    ratio = (_BINS[1] / _BINS[0]) ** 2
    return np.asarray((ratio * fine - coarse) / (ratio - 1))


def _angle_below(n: int, angle: Numbers) -> Numbers:
    """Return the probability that the angle of n differences is less: its density is sin^(n-2)."""
    from scipy.special import betainc

    cosine = np.cos(angle)
    return np.asarray(0.5 - 0.5 * np.sign(cosine) * betainc(0.5, (n - 1) / 2, cosine**2))


def angle_of(n: int, p: float) -> float:
    """Return the angle at which the two-sided p value of n differences is `p`, at most pi / 2."""
    from scipy.special import stdtrit

    if p <= 0:
        return 0.0
    t = -float(stdtrit(n - 1, p / 2))
    return math.atan2(math.sqrt(n - 1), t)


def p_of_angle(n: int, angle: float) -> float:
    """Return the two-sided p value of n differences at an angle of at most pi / 2."""
    from scipy.special import stdtr

    if angle <= 0:
        return 0.0
    return 2 * float(stdtr(n - 1, -math.sqrt(n - 1) / math.tan(angle)))


@lru_cache(maxsize=128)
def null_step(n: int, bins: int) -> Numbers:
    """Return how one more difference moves the angle of n of them.

    The length of x says nothing about its direction, as long as there is no effect. So the next
    difference over the length, y, does not depend on the angles so far: y sqrt(n) has Student's t
    with n degrees of freedom. With a = sum(x) / length and y = tan(phi), the next a is
    (a + y) / sqrt(1 + y^2) = a cos(phi) + sin(phi) = sqrt(1 + a^2) cos(phi - phi_0), where phi_0 =
    atan2(1, a). So the angles are a Markov chain.

    Returns:
        The probabilities of the bins of the next angle (columns) for each bin of this one (rows).
    """
    from scipy.special import betainc

    edges = _edges(bins)
    centers = (edges[1:] + edges[:-1]) / 2
    a = math.sqrt(n) * np.cos(centers)[:, None]
    amplitude = np.sqrt(1 + a**2)
    phi_0 = np.arctan2(1.0, a)

    # The distribution of phi, whose density is cos^(n-1) between -pi/2 and pi/2.
    grid = np.linspace(-math.pi / 2, math.pi / 2, 4001)
    sine = np.sin(grid)
    distribution = 0.5 + 0.5 * np.sign(sine) * betainc(0.5, n / 2, sine**2)

    def below(phi: Numbers) -> Numbers:
        return np.asarray(np.interp(phi, grid, distribution))

    # The next angle is below an edge if the next a is above its cosine: if phi is near phi_0, or
    # near phi_0 - 2 pi, which can be within reach, too.
    next_a = math.sqrt(n + 1) * np.cos(edges)[None, :]
    reach = np.arccos(np.clip(next_a / amplitude, -1.0, 1.0))
    is_below = below(phi_0 + reach) - below(phi_0 - reach) + below(phi_0 + reach - 2 * math.pi)
    return np.diff(is_below, axis=1)


class NullWalk:
    """Comparisons without an effect, from look to look, as long as they have not ended.

    Attributes:
        n: The number of differences so far.
        mass: The probability of each bin of the angle.
    """

    def __init__(self, n: int, bins: int) -> None:
        self.n = n
        self._edges = _edges(bins)
        self.mass: Numbers = np.diff(_angle_below(n, self._edges))

    def go_to(self, n: int) -> None:
        """Add differences until there are `n`."""
        while self.n < n:
            self.mass = self.mass @ null_step(self.n, len(self.mass))
            self.n += 1

    @property
    def _cumulated(self) -> Numbers:
        """The probability below each edge."""
        return np.concatenate([[0.0], np.cumsum(self.mass)])

    @property
    def _power(self) -> float:
        """Probabilities near 0 grow with the power n - 1 of the angle: this makes them linear."""
        return 1 / (self.n - 1)

    def angle_below(self, probability: float) -> float:
        """Return the angle below which comparisons of this probability are."""
        scaled = self._cumulated**self._power
        return float(np.interp(probability**self._power, scaled, self._edges))

    def mass_below(self, angle: float) -> float:
        """Return the probability of comparisons below an angle."""
        scaled = self._cumulated**self._power
        return float(np.interp(angle, self._edges, scaled)) ** (self.n - 1)

    def end(self, probability: float) -> None:
        """End the comparisons of this probability whose angles are nearest to 0 and to pi."""
        cumulated = self._cumulated
        of_one_side = probability / 2
        self.mass = np.diff(np.clip(cumulated, of_one_side, cumulated[-1] - of_one_side))


def size_of(looks: Sequence[int], p_values: Sequence[float]) -> float:
    """Return the probability that some look shows a difference if there is none.

    Args:
        looks: The numbers of seeds, ascending, the first at least 2.
        p_values: The two-sided p value of each look at or below which a difference is shown.
    """
    sizes = []
    for bins in _BINS:
        walk = NullWalk(looks[0], bins)
        size = 0.0
        for n, p in zip(looks, p_values, strict=True):
            walk.go_to(n)
            probability = 2 * walk.mass_below(angle_of(n, p))
            walk.end(probability)
            size += probability
        sizes.append(size)
    return float(_extrapolated(np.array(sizes[0]), np.array(sizes[1])))


def boundaries(looks: Sequence[int], spent: Sequence[float]) -> tuple[float, ...]:
    """Return the p value of each look at or below which a difference is shown.

    Args:
        looks: The numbers of seeds, ascending, the first at least 2.
        spent: For each look the probability to have shown a difference if there is none, ascending.

    Returns:
        Two-sided p values of the t-test.
    """
    coarse, fine = [np.array(_boundaries(looks, spent, bins)) for bins in _BINS]
    return tuple(float(p) for p in np.clip(_extrapolated(coarse, fine), 0.0, 1.0))


def _boundaries(looks: Sequence[int], spent: Sequence[float], bins: int) -> list[float]:
    """Return the boundaries with a number of bins."""
    walk = NullWalk(looks[0], bins)
    p_values: list[float] = []
    already = 0.0
    for n, until_now in zip(looks, spent, strict=True):
        walk.go_to(n)
        probability = until_now - already
        # What the first look spends is its p value, however small that is.
        p = probability
        if p_values:
            p = p_of_angle(n, walk.angle_below(probability / 2))
        p_values.append(p)
        walk.end(probability)
        already = until_now
    return p_values


# The comparison.


class Look(NamedTuple):
    """What is known after a look.

    Attributes:
        number: Which look it is, from 1.
        difference: The difference of the seeds so far.
        p: Its two-sided p value by itself.
        boundary: The p value at or below which this look shows a difference.
        predictive: The predictive probability that the last look shows one; NaN at the last.
        ends: Whether the comparison ends here.
        shown: Whether a difference is shown.
    """

    number: int
    difference: Difference
    p: float
    boundary: float
    predictive: float
    ends: bool
    shown: bool

    @property
    def half(self) -> float:
        """Half of the interval that holds at all looks together.

        It excludes 0 if a difference is shown (C. Jennison, B. W. Turnbull, "Interim analyses: the
        repeated confidence interval approach", JRSS B 51 (1989) 305-361).
        """
        from scipy.special import stdtrit

        n = len(self.difference.seeds)
        return -float(stdtrit(n - 1, self.boundary / 2)) * self.difference.std / math.sqrt(n)


@lru_cache(maxsize=256)
def _boundaries_at(looks: tuple[int, ...], spending: str, level: float) -> tuple[float, ...]:
    """Return the boundaries of a design at a level."""
    shares = np.array(looks) / looks[-1]
    return boundaries(looks, [float(part) for part in SPENDING[spending](level, shares)])


@dataclass(frozen=True)
class Design:
    """When a comparison is looked at, and when it ends. It is fixed before the first run.

    Attributes:
        looks: The numbers of seeds, ascending, the first at least 2.
        spending: A name of `SPENDING`.
        level: The probability to show a difference at some look if there is none.
        futility: A comparison is given up if the predictive probability of a difference at the last
            look is below this one.
    """

    looks: tuple[int, ...]
    spending: str = "Pocock"
    level: float = ERROR
    futility: float = FUTILITY

    @classmethod
    def up_to(cls, most: int) -> Design:
        """Return the usual design for at most so many seeds, which are 2 or more."""
        # Two seeds show hardly anything, and would spend a part of the level.
        first = min(FEWEST, most)
        looks = {max(first, round(share * most)) for share in SHARES}
        return cls(tuple(sorted(looks)))

    @property
    def most(self) -> int:
        """The seeds of the last look."""
        return self.looks[-1]

    def boundaries(self, level: float | None = None) -> tuple[float, ...]:
        """Return the p value of each look at or below which it shows a difference.

        Args:
            level: Another level than that of the design.
        """
        return _boundaries_at(self.looks, self.spending, self.level if level is None else level)

    def look(self, values: Sequence[float], seeds: Sequence[int]) -> Look | None:
        """Return the look at which a comparison ends, or else the last one that can be taken.

        Looks are taken from the first on, so that what is known later changes no verdict.

        Args:
            values: The differences of the seeds in their fixed order, all finite.
            seeds: The seeds.

        Returns:
            The look; None before the first.
        """
        latest = None
        for number, (n, boundary) in enumerate(zip(self.looks, self.boundaries(), strict=True), 1):
            if n > len(values):
                break
            mean, std = mean_and_std(values[:n])
            difference = Difference(tuple(seeds[:n]), mean, std)
            p = difference.p
            shown = p <= boundary

            predictive = math.nan
            is_last = n == self.most
            if not is_last:
                predictive = float(self.predictive(np.array(p), n))
            ends = shown or is_last or predictive < self.futility
            latest = Look(number, difference, p, boundary, predictive, ends, shown)
            if ends:
                break
        return latest

    def predictive(self, p: Numbers, n: int) -> Numbers:
        """Return the probability that the last look shows a difference, as it seems after n seeds.

        The effect is as uncertain as its interval says, and t is taken for a normal statistic: this
        decides what is worth running, and no verdict (D. J. Spiegelhalter, L. S. Freedman, P. R.
        Blackburn, "Monitoring clinical trials: conditional or predictive power?", Controlled
        Clinical Trials 7 (1986) 8-17).

        Args:
            p: Two-sided p values of the seeds so far.
            n: The number of these seeds, less than all.
        """
        from scipy.special import ndtr, ndtri

        share = n / self.most
        needed = -ndtri(self.boundaries()[-1] / 2)
        expected = -ndtri(p / 2) / math.sqrt(share)
        spread = math.sqrt((1 - share) / share)
        same_side = ndtr((expected - needed) / spread)
        other_side = ndtr((-expected - needed) / spread)
        return np.asarray(same_side + other_side)

    def overall_p(self, p_values: Sequence[float]) -> float:
        """Return the p value of a whole comparison: the lowest level at which it is shown.

        It can be corrected together with those of other comparisons, whatever made them end (Q.
        Liu, K. M. Anderson, "On adaptive extensions of group sequential trials for clinical
        investigations", JASA 103 (2008) 1621-1630).

        Args:
            p_values: The p value of each look so far.
        """

        def is_shown(level: float) -> bool:
            limits = self.boundaries(level)
            return any(p <= limit for p, limit in zip(p_values, limits, strict=False))

        if is_shown(_LOWEST):
            return _LOWEST
        below, above = math.log(_LOWEST), 0.0
        if not is_shown(1.0):
            return 1.0
        for _ in range(30):
            middle = (below + above) / 2
            if is_shown(math.exp(middle)):
                above = middle
            else:
                below = middle
        return math.exp(above)

    # What is announced.

    def simulated(self, effect: float, *, repetitions: int = _REPETITIONS) -> tuple[float, float]:
        """Return the power and the mean number of seeds, by simulation with a fixed seed.

        Args:
            effect: The mean difference in standard deviations of the paired differences.
            repetitions: The number of simulated comparisons.
        """
        from lightfed.utils.rng import numpy_generator  # it imports torch

        draws = numpy_generator(0, "comparison")
        values = draws.standard_normal((repetitions, self.most)) + effect
        shown, seeds = self.ends(values)
        return float(shown.mean()), float(seeds.mean())

    def ends(self, values: Numbers) -> tuple[NDArray[np.bool_], NDArray[np.int_]]:
        """Return for many comparisons at once whether they show a difference, and after what seeds.

        Args:
            values: The differences, (comparisons, seeds).
        """
        from scipy.special import stdtr

        shown = np.zeros(len(values), dtype=bool)
        seeds = np.full(len(values), self.most)
        under_way = np.ones(len(values), dtype=bool)
        for n, boundary in zip(self.looks, self.boundaries(), strict=True):
            seen = values[:, :n]
            t = seen.mean(axis=1) / (seen.std(axis=1, ddof=1) / math.sqrt(n))
            p = 2 * stdtr(n - 1, -np.abs(t))

            ends = under_way & (p <= boundary)
            shown |= ends
            if n < self.most:
                ends |= under_way & (self.predictive(p, n) < self.futility)
            seeds[ends] = n
            under_way &= ~ends
        return shown, seeds

    def detectable(self) -> float:
        """Return the effect that is found with the power `POWER`, in standard deviations.

        They are those of the paired differences over the seeds.
        """
        return _detectable(self)


@lru_cache(maxsize=64)  # the simulations take a tenth of a second, and all cases share a design
def _detectable(design: Design) -> float:
    """See `Design.detectable`."""
    below, above = 0.0, 1.0
    while design.simulated(above)[0] < POWER:
        above *= 2
    for _ in range(12):
        middle = (below + above) / 2
        if design.simulated(middle)[0] < POWER:
            below = middle
        else:
            above = middle
    return above
