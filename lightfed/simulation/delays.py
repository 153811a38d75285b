"""Distributions of delays in virtual seconds, and of rates: classes for the configuration.

`expected` concerns tau_(B), the B-th smallest of N independent values, each the largest of m
delays.
"""

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import integrate, special, stats
from typing_extensions import override

from lightfed.utils.errors import UserError, require
from lightfed.utils.recorded import Recorded

Size = int | tuple[int, ...]


class Distribution(Recorded, ABC):
    """A distribution of nonnegative numbers: of delays, or of what devices do in a second."""

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

    def __post_init__(self) -> None:
        _check("largest", self.largest)
        _check("exponent", self.exponent, above=1.0)

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

    @property
    @abstractmethod
    def law(self) -> Any:
        """The frozen distribution of scipy.stats."""

    @override
    def quantile(self, p: float) -> float:
        return float(self.law.ppf(p))

    @override
    def expected(self, wait: int, servers: int, devices: int = 1) -> float:
        """The integral of t(y) exp(-y) over y > 0, where P(tau_(B) > t(y)) = exp(-y).

        P(tau_(B) > t) is that of a beta variable of parameters N - B + 1 and B below the
        probability that one server, the largest of its m delays, is late.
        """
        law, late = self.law, servers - wait + 1

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

    def __post_init__(self) -> None:
        _check("mean", self.mean)

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return rng.exponential(self.mean, size)

    @property
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

    def __post_init__(self) -> None:
        _check("shape", self.shape, above=0.01)
        _check("scale", self.scale)

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return self.scale * rng.weibull(self.shape, size)

    @property
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

    def __post_init__(self) -> None:
        _check("mu", self.mu, above=-200.0, below=200.0)
        _check("sigma", self.sigma, below=10.0)

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return rng.lognormal(self.mu, self.sigma, size)

    @property
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
            _check("low", self.low)
        _check("high", self.high, above=self.low)

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return rng.uniform(self.low, self.high, size)

    @property
    @override
    def law(self) -> Any:
        return stats.uniform(self.low, self.high - self.low)


@dataclass(frozen=True)
class Constant(Delay):
    """Every delay is the same."""

    value: float
    """Virtual seconds."""

    def __post_init__(self) -> None:
        _check("value", self.value)

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return np.full(size, self.value)

    @override
    def quantile(self, p: float) -> float:
        return self.value

    @override
    def expected(self, wait: int, servers: int, devices: int = 1) -> float:
        return self.value


@dataclass(frozen=True)
class Trace(Delay):
    """Measured delays, drawn at random with replacement."""

    path: Path
    """A text or .csv file of delays in virtual seconds: one on each line, or rows with commas."""
    values: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", np.sort(_read_trace(self.path)))

    @override
    def __str__(self) -> str:
        return f"Trace(path={self.path})"

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


def _read_trace(path: Path) -> np.ndarray:
    """(n,) the delays of a file; a UserError if it holds something else, or none above 0."""
    key, fix = "delay.init_args.path", "name a text file of delays of at least 0, some above 0"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy only warns about an empty file
            values = np.loadtxt(path, delimiter=",", ndmin=1, encoding="utf-8").ravel()
    except (OSError, ValueError, UserWarning) as error:
        raise UserError(key, f"{path} cannot be read ({error})", fix) from error
    found = f"delays from {values.min():g} to {values.max():g} in {path}"
    require(values.min() >= 0 and 0 < values.max() < math.inf, key, found, fix)
    return values


def _check(name: str, value: float, *, above: float = 0.0, below: float = 1e100) -> None:
    """Reject values out of bounds; the bounds keep every draw and every mean finite."""
    fix = f"give a number above {above:g} and below {below:g}"
    require(above < value < below, f"delay.init_args.{name}", f"{value:g}", fix)
