"""Distributions of delays in virtual seconds, and of rates: classes for the configuration.

`expected` concerns tau_(B), the B-th smallest of N independent values, each the largest of m
delays.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy import integrate, special, stats
from typing_extensions import override

from lightfed.utils.errors import UserError, require
from lightfed.utils.recorded import Recorded

Size = int | tuple[int, ...]
_MOST = 1e100


class Distribution(Recorded, ABC):
    """A distribution of nonnegative numbers: of delays, or of what devices do in a second.

    `bounds` are those of arguments, which lie between; they keep every draw and mean finite.
    """

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def __post_init__(self) -> None:
        for name, (low, high) in self.bounds.items():
            self._check(name, low, high)

    def _check(self, name: str, above: float, below: float) -> None:
        """Reject an argument out of bounds."""
        value, fix = getattr(self, name), f"give a number above {above:g} and below {below:g}"
        require(above < value < below, f"{type(self).__name__}.{name}", f"{value:g}", fix)

    @abstractmethod
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        """Independent numbers of shape `size`."""


@dataclass(frozen=True)
class Zipf(Distribution):
    """The largest over Z, P(Z = z) ~ z ** -exponent: most rates are the largest, a few far less."""

    largest: float
    """Of all numbers."""
    exponent: float = 2.0
    """Above 1; 2 gives three of five numbers the largest value, 4 nine of ten."""
    bounds = {"largest": (0.0, _MOST), "exponent": (1.0, _MOST)}

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return self.largest / rng.zipf(self.exponent, size)


class Delay(Distribution):
    """A distribution of nonnegative delays, in virtual seconds."""

    @abstractmethod
    def quantile(self, p: float) -> float:
        """The smallest t with P(T <= t) >= p, for 0 < p < 1."""

    @abstractmethod
    def expected(self, wait: int, servers: int, devices: int = 1) -> float:
        """E[tau_(B)] in virtual seconds: B = `wait`, N = `servers`, m = `devices`."""


class _Continuous(Delay):
    """A delay with a density."""

    @abstractmethod
    def law(self) -> Any:
        """The frozen distribution of scipy.stats."""

    @override
    def quantile(self, p: float) -> float:
        return float(self.law().ppf(p))

    @override
    def expected(self, wait: int, servers: int, devices: int = 1) -> float:
        """The integral of t(y) exp(-y) over y > 0, where P(tau_(B) > t(y)) = exp(-y).

        P(tau_(B) > t) is that of a beta variable of parameters N - B + 1 and B below the
        probability that one server, the largest of its m delays, is late.
        """
        law, late = self.law(), servers - wait + 1

        def weighted(y: float) -> float:
            server = special.betaincinv(late, wait, math.exp(-y))
            device = -math.expm1(math.log1p(-server) / devices)
            return float(law.isf(device)) * math.exp(-y)

        # The integrand matters near y = 1 for light tails and near 100 for the heaviest. Beyond 200
        # it is below rounding errors, and `betaincinv` fails from 300.
        places = (1, 10, 100)
        return integrate.quad(weighted, 0, 200, points=places, epsabs=0, epsrel=1e-10, limit=500)[0]


@dataclass(frozen=True)
class Exponential(_Continuous):
    """Memoryless: P(T > t) = exp(-t / mean)."""

    mean: float
    """Virtual seconds."""
    bounds = {"mean": (0.0, _MOST)}

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return rng.exponential(self.mean, size)

    @override
    def law(self) -> Any:
        return stats.expon(scale=self.mean)


@dataclass(frozen=True)
class Weibull(_Continuous):
    """P(T > t) = exp(-(t / scale) ** shape); a shape below 1 has a heavy tail."""

    shape: float
    """1 is exponential, above 1 lighter, below 1 heavier."""
    scale: float = 1.0
    """Virtual seconds that a share of 1/e of the delays exceeds."""
    bounds = {"shape": (0.01, _MOST), "scale": (0.0, _MOST)}

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return self.scale * rng.weibull(self.shape, size)

    @override
    def law(self) -> Any:
        return stats.weibull_min(self.shape, scale=self.scale)


@dataclass(frozen=True)
class LogNormal(_Continuous):
    """The logarithm of the delay, in virtual seconds, is normal."""

    mu: float
    """Mean of the logarithm: half of all delays are below exp(mu) virtual seconds."""
    sigma: float
    """Standard deviation of the logarithm."""
    bounds = {"mu": (-200.0, 200.0), "sigma": (0.0, 10.0)}

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return rng.lognormal(self.mu, self.sigma, size)

    @override
    def law(self) -> Any:
        return stats.lognorm(self.sigma, scale=math.exp(self.mu))


@dataclass(frozen=True)
class Uniform(_Continuous):
    """Delays uniform between two bounds."""

    low: float
    """Virtual seconds, at least 0."""
    high: float
    """Virtual seconds, above `low`."""

    def __post_init__(self) -> None:
        if self.low != 0.0:
            self._check("low", 0.0, _MOST)
        self._check("high", self.low, _MOST)

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return rng.uniform(self.low, self.high, size)

    @override
    def law(self) -> Any:
        return stats.uniform(self.low, self.high - self.low)


class _Discrete(Delay):
    """One of some values, all alike."""

    values: np.ndarray  # ascending

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return rng.choice(self.values, size)

    @override
    def quantile(self, p: float) -> float:
        return float(np.quantile(self.values, p, method="inverted_cdf"))

    @override
    def expected(self, wait: int, servers: int, devices: int = 1) -> float:
        """A sum over the values, exact."""
        in_time = np.linspace(0.0, 1.0, len(self.values) + 1) ** devices
        weights = np.diff(special.betainc(wait, servers - wait + 1, in_time))
        return float(weights @ self.values)


@dataclass(frozen=True)
class Constant(_Discrete):
    """Every delay is the same."""

    value: float
    """Virtual seconds."""
    bounds = {"value": (0.0, _MOST)}

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "values", np.array([self.value]))


@dataclass(frozen=True)
class Trace(_Discrete):
    """Measured delays, drawn at random with replacement."""

    path: Path
    """A text or .csv file of delays in virtual seconds: one on each line, or rows with commas."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", np.sort(_read_trace(self.path)))

    @override
    def __str__(self) -> str:
        return f"Trace(path={self.path})"


def _read_trace(path: Path) -> np.ndarray:
    """(n,) the delays of a file; a UserError if it holds something else, or none above 0."""
    key, fix = "Trace.path", "name a text file of delays of at least 0, some above 0"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy only warns about an empty file
            values = np.loadtxt(path, delimiter=",", ndmin=1, encoding="utf-8").ravel()
    except (OSError, ValueError, UserWarning) as error:
        raise UserError(key, f"{path} cannot be read ({error})", fix) from error
    found = f"delays from {values.min():g} to {values.max():g} in {path}"
    require(values.min() >= 0 and 0 < values.max() < math.inf, key, found, fix)
    return values
