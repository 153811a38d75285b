"""FedBCD and FedBCD-I as the paper writes them, in float64, for devices with linear regressions.

g_i(x) = 1/2 ||X_i x - y_i||^2, whose gradient is A_i x - b_i. Phases are drawn by the algorithm's
hierarchy; the protocol, the sessions and the servers' steps are written out once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedbcd.fedbcdi import FedBCDI
from lightfed.algorithms.fedbcd.hierarchy import Phase
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from tests.small import Line, data_of, fleet_of

START = (1.0, -0.5)
SAMPLES = 3
ROW_BYTES = 4 * len(START)


def regressions(devices: int, seed: int = 0) -> FederatedDataModule:
    """Three random samples of two features for every device, in one batch."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(devices * SAMPLES, 2, generator=rng) / 2
    y = torch.randint(0, 4, (len(x),), generator=rng)
    parts = [range(k * SAMPLES, (k + 1) * SAMPLES) for k in range(devices)]
    return data_of(x, y, parts, classes=4)


@dataclass
class Local:
    """Settings of ASPG."""

    eta: float = 0.2
    zeta: float = 0.5
    box: tuple[float, float] | None = None


def federation(algorithm: FedBCD, count: int, local: Local, **settings: Any) -> Fleet:
    optimizer = partial(ASPG, lr=local.eta, momentum=local.zeta, box=local.box)
    return fleet_of(
        [ClientGroup(count, partial(Line, START))], algorithm, regressions(count),
        optimizer=optimizer, **settings,
    )  # fmt: skip


class Oracle:
    """The state of a federation, x_i, z_n and the queue, and a round of it."""

    def __init__(self, algorithm: FedBCD, devices: int, local: Local, seed: int = 0) -> None:
        self.algorithm, self.local, self.seed, self.devices = algorithm, local, seed, devices
        samples = regressions(devices).dataset.load("train")
        xs = samples.x.double().numpy().reshape(devices, SAMPLES, 2)
        ys = samples.y.double().numpy().reshape(devices, SAMPLES)
        self.A = np.einsum("ksi,ksj->kij", xs, xs)
        self.b = np.einsum("ksi,ks->ki", xs, ys)
        self.servers = algorithm.hierarchy.servers
        self.x = np.tile(np.array(START), (devices, 1))
        self.before = self.x.copy()  # x^{(t, -1)}: momentum is what they differ by
        self.z = np.tile(np.array(START), (self.servers, 1))
        self.offline = [0] * devices
        self.busy: dict[int, tuple[float, Phase]] = {}  # server -> when it is done, with what
        self.now = 0.0

    def of(self, server: int) -> Sequence[int]:
        each = self.devices // self.servers
        return range(server * each, server * each + each)

    def round(self, t: int) -> dict[str, float]:
        down = 0
        for n in range(self.servers):
            if n not in self.busy:
                phase = self.algorithm.hierarchy.phase(n, t, clients=self.devices, seed=self.seed)
                self.busy[n] = self.now + max(phase.delays.values()), phase
                self._start(n, phase)
                down += self._pulled(phase)
        order = sorted(self.busy, key=lambda n: (self.busy[n][0], n))
        first = sorted(order[: self.algorithm.wait])
        self.now = self.busy[order[self.algorithm.wait - 1]][0]
        up = sum(self._pulled(self.busy[n][1]) for n in first)
        self._step(first, t)
        for n in first:
            del self.busy[n]
        return {
            "virtual_time": self.now, "bytes_down": down * ROW_BYTES, "bytes_up": up * ROW_BYTES,
            "server_bytes": self._messages(first) * ROW_BYTES,
        }  # fmt: skip

    def _pulled(self, phase: Phase) -> int:
        """Active devices that have a pull: nobody talks to the others."""
        return sum(self.algorithm.gamma(i) > 0 for i in phase.active)

    def _messages(self, first: list[int]) -> int:
        """A model up and one down for each of several servers, or one along each edge."""
        if not any(self.algorithm.gammas):
            return 0
        if self.algorithm.mixing is None:
            return 2 * len(first) * (self.servers > 1)
        edges = [(n, m) for n in range(self.servers) for m in range(self.servers) if n != m]
        return sum(bool(self.algorithm.mixing[n][m]) for n, m in edges)

    def _start(self, n: int, phase: Phase) -> None:
        a = self.algorithm
        if not isinstance(a, FedBCDI):
            for i in phase.active:
                self._train(i, phase.units[i], pull=a.gamma(i) * (2 if a.compatibility else 1), n=n)
            return
        for i in phase.available:
            if self.offline[i] < a.patience:
                self._train(i, phase.units[i], pull=0.0, n=n)
                self.offline[i] += 1
        for i in phase.active:
            self.offline[i] = 0
            ahead = self.x[i] - self.before[i]
            for _ in range(phase.units[i]):
                self.x[i] = self._clamped(self.x[i] - a.gamma(i) * (self.x[i] - self.z[n]))
            self.before[i] = self.x[i] - ahead

    def _train(self, i: int, steps: int, *, pull: float, n: int) -> None:
        """(4a), (4b)."""
        for _ in range(steps):
            ex = self.x[i] + self.local.zeta * (self.x[i] - self.before[i])
            gradient = self.A[i] @ ex - self.b[i] + pull * (ex - self.z[n])
            self.before[i], self.x[i] = self.x[i], self._clamped(ex - self.local.eta * gradient)

    def _clamped(self, x: np.ndarray) -> np.ndarray:
        return x if self.local.box is None else np.clip(x, *self.local.box)

    def _stepped(self, n: int) -> Sequence[int]:
        """Q_n in (5) and (6): all devices, or in FedBCD-I the active ones."""
        return self.busy[n][1].active if isinstance(self.algorithm, FedBCDI) else self.of(n)

    def _sum(self, n: int, z: np.ndarray) -> np.ndarray:
        return sum(
            (self.algorithm.gamma(i) * (z - self.x[i]) for i in self._stepped(n)), np.zeros(2)
        )

    def _step(self, first: list[int], t: int) -> None:
        a = self.algorithm
        rate = a.server_lr * (0.9999**t if a.compatibility else 1.0)
        sums = {n: sum(a.gamma(i) for i in self._stepped(n)) for n in range(self.servers)}
        if a.wait == self.servers and a.mixing is None:  # (5)
            total = sum(sums.values()) if a.server_step == "mean" else 1.0
            move = sum(self._sum(n, self.z[n]) for n in range(self.servers))
            self.z = self.z - rate * move / (total or 1.0)
            return
        old = self.z.copy()
        for n in first:
            w = old[first].mean(0) if a.mixing is None else a.mixing[n] @ old  # (6a)
            total = sums[n] if a.server_step == "mean" else 1.0
            self.z[n] = w - rate * self._sum(n, w) / (total or 1.0)  # (6b)
