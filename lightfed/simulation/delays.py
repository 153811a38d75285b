"""Distributions of delays in virtual seconds: classes that a configuration names.

Each knows how to be drawn and its exact law. `integral` is what expectations of order statistics
are made of: the expectation of a delay T >= 0 is the integral of its survival function P(T > t)
over t >= 0, and the survival function of an order statistic is a function h of that of one delay.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from statistics import NormalDist

import numpy as np
from typing_extensions import override

from lightfed.simulation.quadrature import Integral, integrate, integrate_positive
from lightfed.simulation.trace_file import read_trace
from lightfed.utils.errors import UserError

Law = Callable[[np.ndarray], np.ndarray]
"""From survival probabilities in 0..1 to such; nondecreasing, 0 at 0 and 1 at 1."""

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


class Delay(ABC):
    """A distribution of nonnegative delays, in virtual seconds."""

    @property
    @abstractmethod
    def mean_delay(self) -> float:
        """The expectation, in virtual seconds."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        """Independent delays of shape `size`, from the one source of randomness given."""

    @abstractmethod
    def survival(self, t: np.ndarray) -> np.ndarray:
        """P(T > t) for times t >= 0 of any shape; accurate where it is tiny, too."""

    @abstractmethod
    def quantile(self, p: float) -> float:
        """The least t with P(T <= t) >= p, for p in 0 <= p < 1."""

    def cdf(self, t: np.ndarray) -> np.ndarray:
        """P(T <= t) for times t >= 0 of any shape."""
        return 1.0 - self.survival(t)

    def __str__(self) -> str:
        """As in `Weibull(shape=0.5, scale=1)`."""
        given = [(name, getattr(self, name)) for name in signature(type(self)).parameters]
        words = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in given]
        return f"{type(self).__name__}({', '.join(words)})"

    def integral(self, law: Law) -> Integral:
        """The integral of law(survival(t)) over t >= 0, in virtual seconds.

        Here of delays whose survival function is smooth in log t.
        """
        return integrate_positive(lambda t: law(self.survival(t)), scale=self.mean_delay)


@dataclass(frozen=True)
class Exponential(Delay):
    """Memoryless: P(T > t) = exp(-t / mean)."""

    mean: float
    """Virtual seconds."""

    def __post_init__(self) -> None:
        _check_positive("mean", self.mean)

    @property
    @override
    def mean_delay(self) -> float:
        return self.mean

    @override
    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        return rng.exponential(self.mean, size)

    @override
    def survival(self, t: np.ndarray) -> np.ndarray:
        return np.exp(-t / self.mean)

    @override
    def quantile(self, p: float) -> float:
        return -self.mean * math.log1p(-p)


@dataclass(frozen=True)
class Weibull(Delay):
    """P(T > t) = exp(-(t / scale) ** shape); a shape below 1 has a heavy tail."""

    shape: float
    """1 is exponential, above 1 lighter, below 1 heavier."""
    scale: float = 1.0
    """Virtual seconds after which a share of 1/e is still out."""

    def __post_init__(self) -> None:
        _check_positive("shape", self.shape)
        _check_positive("scale", self.scale)
        _check_mean(self, self._log_mean())

    def _log_mean(self) -> float:
        steep = min(1.0 / self.shape, 1e9)  # beyond that the mean is refused anyway
        return math.log(self.scale) + math.lgamma(1.0 + steep)

    @property
    @override
    def mean_delay(self) -> float:
        return math.exp(self._log_mean())

    @override
    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        return self.scale * rng.weibull(self.shape, size)

    @override
    def survival(self, t: np.ndarray) -> np.ndarray:
        return np.exp(-((t / self.scale) ** self.shape))

    @override
    def quantile(self, p: float) -> float:
        return float(self.scale * (-math.log1p(-p)) ** (1.0 / self.shape))


@dataclass(frozen=True)
class LogNormal(Delay):
    """The logarithm of the delay, in virtual seconds, is normal."""

    mu: float
    """Mean of the logarithm: half of all delays are below exp(mu) virtual seconds."""
    sigma: float
    """Standard deviation of the logarithm."""

    def __post_init__(self) -> None:
        _check_positive("sigma", self.sigma)
        _check_mean(self, self._log_mean())

    def _log_mean(self) -> float:
        return self.mu + self.sigma * self.sigma / 2

    @property
    @override
    def mean_delay(self) -> float:
        return math.exp(self._log_mean())

    @override
    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        return rng.lognormal(self.mu, self.sigma, size)

    @override
    def survival(self, t: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):  # log 0 = -inf, which all delays exceed
            z = (np.log(t) - self.mu) / self.sigma
        return np.asarray(0.5 * _erfc(z / math.sqrt(2.0)))

    @override
    def quantile(self, p: float) -> float:
        return math.exp(self.mu + self.sigma * NormalDist().inv_cdf(p)) if p > 0 else 0.0


@dataclass(frozen=True)
class Uniform(Delay):
    """All delays between two bounds are as likely."""

    low: float
    """Virtual seconds, at least 0."""
    high: float
    """Virtual seconds, above `low`."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < math.inf:
            raise UserError(_key("low"), f"{self.low:g}", "give a finite number of at least 0")
        if not self.low < self.high < math.inf:
            fix = f"give a finite number above low, {self.low:g}"
            raise UserError(_key("high"), f"{self.high:g}", fix)

    @property
    @override
    def mean_delay(self) -> float:
        return self.low + (self.high - self.low) / 2

    @override
    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        return rng.uniform(self.low, self.high, size)

    @override
    def survival(self, t: np.ndarray) -> np.ndarray:
        return np.clip((self.high - t) / (self.high - self.low), 0.0, 1.0)

    @override
    def quantile(self, p: float) -> float:
        return self.low + p * (self.high - self.low)

    @override
    def integral(self, law: Law) -> Integral:
        """As of all delays; up to `low` the integrand is 1, between the bounds a polynomial."""
        width = self.high - self.low
        found = integrate(law, 0.0, 1.0)  # over the survival probability, which falls evenly
        return Integral(self.low + width * found.value, width * found.error)


@dataclass(frozen=True)
class Constant(Delay):
    """Every delay is the same."""

    value: float
    """Virtual seconds."""

    def __post_init__(self) -> None:
        _check_positive("value", self.value)

    @property
    @override
    def mean_delay(self) -> float:
        return self.value

    @override
    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        return np.full(size, self.value)

    @override
    def survival(self, t: np.ndarray) -> np.ndarray:
        return np.where(t < self.value, 1.0, 0.0)

    @override
    def quantile(self, p: float) -> float:
        return self.value

    @override
    def integral(self, law: Law) -> Integral:
        """The value: any order statistic of one number is that number."""
        return Integral(self.value, 0.0)


@dataclass(frozen=True)
class Trace(Delay):
    """Measured delays; each draw is one of them, at random and with replacement."""

    path: Path
    """A text file with one delay in virtual seconds on each line."""
    values: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", np.sort(read_trace(self.path, key=_key("path"))))

    @property
    @override
    def mean_delay(self) -> float:
        return float(self.values.mean())

    @override
    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        return rng.choice(self.values, size)

    @override
    def survival(self, t: np.ndarray) -> np.ndarray:
        return 1.0 - np.searchsorted(self.values, t, side="right") / len(self.values)

    @override
    def quantile(self, p: float) -> float:
        return float(np.quantile(self.values, p, method="inverted_cdf"))

    @override
    def integral(self, law: Law) -> Integral:
        """A sum over the steps of the survival function, exact."""
        heights = law(1.0 - np.arange(len(self.values)) / len(self.values))
        return Integral(float(heights @ np.diff(self.values, prepend=0.0)), 0.0)


def _key(name: str) -> str:
    return f"delay.init_args.{name}"


def _check_positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise UserError(_key(name), f"{value:g}", "give a finite number above 0")


def _check_mean(delay: Delay, log_mean: float) -> None:
    """Refuse parameters whose mean is no floating-point number."""
    if not abs(log_mean) < 700.0:  # also NaN
        raise UserError(
            "delay", f"{delay} has a mean of exp({log_mean:g})", "give milder arguments"
        )
