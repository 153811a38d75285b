"""Distributions of delays, in virtual seconds, and of rates: classes for the configuration.

The expected waiting time of a cloud is that for the first B of N servers, each of which waits for
the slowest of its m devices. So `expected` is about tau_(B), the B-th smallest of N independent
values, each of which is the largest of m delays.
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

from lightfed.utils.errors import UserError
from lightfed.utils.recorded import Recorded

Size = int | tuple[int, ...]

# Beyond this a draw or a mean may be infinite.
_LARGEST = 1e100


class Distribution(Recorded, ABC):
    """A distribution of nonnegative numbers: of delays, or of what devices do in a second.

    Attributes:
        bounds: For arguments by name, two numbers between which they must lie. They keep every draw
            and every mean finite.
    """

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def __post_init__(self) -> None:
        for name, (low, high) in self.bounds.items():
            self._check_between(name, low, high)

    def _check_between(self, name: str, low: float, high: float) -> None:
        """Refuse an argument that does not lie between two numbers."""
        value = getattr(self, name)
        if not low < value < high:
            raise UserError(
                f"{type(self).__name__}.{name}",
                f"{value:g}",
                f"give a number above {low:g} and below {high:g}",
            )

    @abstractmethod
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        """Return independent numbers, in an array of shape `size`."""


@dataclass(frozen=True)
class Zipf(Distribution):
    """Numbers `largest` / Z, P(Z = z) ~ z ** -exponent: most are large, and a few far smaller."""

    largest: float
    """The largest number, which is also the most frequent one."""
    exponent: float = 2.0
    """Above 1; 2 gives three of five numbers the largest value, 4 nine of ten."""
    bounds = {"largest": (0.0, _LARGEST), "exponent": (1.0, _LARGEST)}

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return self.largest / rng.zipf(self.exponent, size)


class Delay(Distribution):
    """A distribution of nonnegative delays, in virtual seconds."""

    @abstractmethod
    def quantile(self, p: float) -> float:
        """Return the smallest t with P(T <= t) >= p, in virtual seconds, for 0 < p < 1."""

    @abstractmethod
    def expected(self, wait: int, servers: int, devices: int = 1) -> float:
        """Return E[tau_(B)], in virtual seconds.

        Args:
            wait: B, the number of servers that the cloud waits for.
            servers: N.
            devices: m, the number of devices of a server.
        """


class _Continuous(Delay):
    """A delay with a density."""

    @abstractmethod
    def law(self) -> Any:
        """Return the distribution as a frozen one of scipy.stats."""

    @override
    def quantile(self, p: float) -> float:
        return float(self.law().ppf(p))

    @override
    def expected(self, wait: int, servers: int, devices: int = 1) -> float:
        """Return E[tau_(B)], in virtual seconds, by numerical integration.

        It is the integral of t(y) exp(-y) over y > 0, where t(y) is the time with
        P(tau_(B) > t(y)) = exp(-y). The B-th smallest is late if at least N - B + 1 servers are. So
        P(tau_(B) > t) is the probability that a beta variable with parameters N - B + 1 and B is
        below the probability that one server is late at t.
        """
        law = self.law()
        late_servers = servers - wait + 1

        def integrand(y: float) -> float:
            # The probability that one server is late, and from it that one of its devices is.
            server_is_late = special.betaincinv(late_servers, wait, math.exp(-y))
            device_is_late = -math.expm1(math.log1p(-server_is_late) / devices)
            return float(law.isf(device_is_late)) * math.exp(-y)

        # The integrand matters near y = 1 for light tails and near 100 for the heaviest. Beyond 200
        # it is below rounding errors, and `betaincinv` fails from 300.
        mean, _ = integrate.quad(
            integrand, 0, 200, points=(1, 10, 100), epsabs=0, epsrel=1e-10, limit=500
        )
        return mean


@dataclass(frozen=True)
class Exponential(_Continuous):
    """Memoryless: P(T > t) = exp(-t / mean)."""

    mean: float
    """Virtual seconds."""
    bounds = {"mean": (0.0, _LARGEST)}

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
    """1 is exponential; above 1 the tail is lighter, below 1 heavier."""
    scale: float = 1.0
    """Virtual seconds, which a share of 1/e of the delays exceeds."""
    bounds = {"shape": (0.01, _LARGEST), "scale": (0.0, _LARGEST)}

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
            self._check_between("low", 0.0, _LARGEST)
        self._check_between("high", self.low, _LARGEST)

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return rng.uniform(self.low, self.high, size)

    @override
    def law(self) -> Any:
        return stats.uniform(self.low, self.high - self.low)


class _Discrete(Delay):
    """One of several values, all with the same probability.

    Attributes:
        values: The values in virtual seconds, (n,) ascending.
    """

    values: np.ndarray

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return rng.choice(self.values, size)

    @override
    def quantile(self, p: float) -> float:
        return float(np.quantile(self.values, p, method="inverted_cdf"))

    @override
    def expected(self, wait: int, servers: int, devices: int = 1) -> float:
        """Return E[tau_(B)], in virtual seconds: a sum over the values, which is exact."""
        # The probability that a server is done at each of the values; at first none is.
        server_is_done = np.linspace(0.0, 1.0, len(self.values) + 1) ** devices
        enough_are_done = special.betainc(wait, servers - wait + 1, server_is_done)
        probabilities = np.diff(enough_are_done)
        return float(probabilities @ self.values)


@dataclass(frozen=True)
class Constant(_Discrete):
    """Every delay is the same."""

    value: float
    """Virtual seconds."""
    bounds = {"value": (0.0, _LARGEST)}

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
    """Return the delays of a file, (n,).

    Raises:
        UserError: The file cannot be read, or holds something other than delays of at least 0, some
            of them above 0.
    """
    key = "Trace.path"
    fix = "name a text file of delays of at least 0, some above 0"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy only warns about an empty file
            values = np.loadtxt(path, delimiter=",", ndmin=1, encoding="utf-8").ravel()
    except (OSError, ValueError, UserWarning) as error:
        raise UserError(key, f"{path} cannot be read ({error})", fix) from error

    fits = values.min() >= 0 and 0 < values.max() < math.inf
    if not fits:
        raise UserError(key, f"delays from {values.min():g} to {values.max():g} in {path}", fix)
    return values
