"""How long a round of a cloud lasts when it waits for the first B of N servers.

Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and Personalized Models",
AAAI 2021, arXiv:2012.13900, "latency analysis": the ratio r_{B,N} = E[tau_(B)] / E[tau_(N)] of the
order statistics of the servers' i.i.d. delays tau_n (eq. (7)), and its limit for many servers
(eq. (8)). The paper allows any distribution of tau_n. Here tau_n is the largest delay of a server's
active devices.

In eq. (7) every server restarts in every round. In a run late servers continue. With nearly
constant delays a round is then shorter than (7) predicts. With heavy tails it is longer, because
stragglers accumulate. For exponential delays of one device it is the same. `in_a_run` measures it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightfed.simulation.clock import VirtualClock
from lightfed.simulation.delays import Delay
from lightfed.utils.rng import numpy_generator

_DRAWS_AT_ONCE = 1 << 20
_BATCHES = 20  # of consecutive rounds, whose means are nearly independent
_ROUNDS = 100  # in a batch


@dataclass(frozen=True)
class Estimate:
    """A simulated number and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Cloud:
    """N servers with so many active devices each, whose delays are in virtual seconds."""

    delay: Delay
    servers: int
    devices: int

    def expected(self, wait: int) -> float:
        """E[tau_(B)] in virtual seconds."""
        return self.delay.expected(wait, self.servers, self.devices)

    def asymptotic(self, wait: int) -> float:
        """Eq. (8): r_{B,N} <~ F^-1(B/N) / F^-1(1 - 1/N), F that of tau_n; NaN for B = N."""
        if wait == self.servers:
            return math.nan
        last = self._quantile(1 - 1 / self.servers)
        return self._quantile(wait / self.servers) / last if last > 0 else math.nan

    def _quantile(self, p: float) -> float:
        """F^-1(p) of tau_n: the largest of m delays is below t with probability P(T <= t) ** m."""
        return self.delay.quantile(p ** (1 / self.devices))

    def draws(self, waits: int, samples: int) -> int:
        """How many delays `latencies` draws for so many numbers B."""
        rounds = (_BATCHES + 1) * _ROUNDS
        return self.servers * self.devices * (samples + waits * rounds)

    def simulated(
        self, waits: Sequence[int], *, samples: int, rng: np.random.Generator
    ) -> list[Estimate]:
        """r_{B,N} for each B, from `samples` rounds in which all servers restart."""
        rows = max(1, _DRAWS_AT_ONCE // (self.servers * self.devices))
        columns = [wait - 1 for wait in (*waits, self.servers)]
        parts = []
        for first in range(0, samples, rows):
            shape = (min(rows, samples - first), self.servers, self.devices)
            order = np.sort(self.delay.draw(rng, shape).max(axis=2), axis=1)
            parts.append(order[:, columns])
        drawn = np.concatenate(parts)
        return [_ratio(drawn[:, place], drawn[:, -1]) for place in range(len(waits))]

    def in_a_run(self, wait: int, *, rng: np.random.Generator) -> Estimate:
        """Mean virtual seconds of a round on the virtual clock, where late servers continue.

        The rounds are consecutive. The error is that of batch means, without the first batch.
        """
        clock = VirtualClock(self.servers, wait)
        ends = []
        for _ in range(_BATCHES + 1):
            for _ in range(_ROUNDS):
                shape = (len(clock.idle), self.devices)
                clock.advance(self.delay.draw(rng, shape).max(axis=1))
            ends.append(clock.now)
        means = np.diff(ends) / _ROUNDS
        return Estimate(float(means.mean()), float(means.std(ddof=1)) / math.sqrt(_BATCHES))


@dataclass(frozen=True)
class Latency:
    """The effect of waiting for B servers.

    Attributes:
        wait: B.
        expected: E[tau_(B)] in virtual seconds.
        ratio: r_{B,N}, exact.
        simulated: r_{B,N} by simulation.
        asymptotic: eq. (8); NaN where it does not apply.
        in_a_run: mean duration of a round in a run, relative to E[tau_(N)].
    """

    wait: int
    expected: float
    ratio: float
    simulated: Estimate
    asymptotic: float
    in_a_run: Estimate


def latencies(cloud: Cloud, waits: Sequence[int], *, samples: int, seed: int) -> list[Latency]:
    """The analysis for each B; B is part of the name of its draws."""
    full = cloud.expected(cloud.servers)
    simulated = cloud.simulated(
        waits, samples=samples, rng=numpy_generator(seed, "latency/independent")
    )
    found = []
    for wait, ratio in zip(waits, simulated, strict=True):
        expected = cloud.expected(wait)
        run = cloud.in_a_run(wait, rng=numpy_generator(seed, "latency/run", round=wait))
        relative = Estimate(run.value / full, run.error / full)
        exact = expected / full
        found.append(Latency(wait, expected, exact, ratio, cloud.asymptotic(wait), relative))
    return found


def _ratio(top: np.ndarray, bottom: np.ndarray) -> Estimate:
    """Ratio of the means of pairs (S,), with its first-order error (delta method)."""
    ratio = float(top.mean() / bottom.mean())
    error = (top - ratio * bottom).std(ddof=1) / (math.sqrt(len(top)) * bottom.mean())
    return Estimate(ratio, float(error))
