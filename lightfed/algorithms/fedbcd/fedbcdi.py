"""FedBCD-I: FedBCD with devices that train offline and are pulled when they connect.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900

Algorithm 2: the cost and the pull of problem (2) are handled one after the other. More devices
train than connect to their server (Q_n in Q~_n); a server steps only with the active ones.

Choices where the paper is silent: a device that has trained offline for `patience` rounds pauses
until it is active, and is then pulled without training. Momentum is that of the training steps, not
of the pulls. The released code counts one more round (`compatibility`).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.api.fleet import Fleet
from lightfed.utils.bounds import Count, Weight


class FedBCDI(FedBCD):
    """FedBCD-I: devices train offline, without a pull; the active ones are pulled afterwards."""

    moments = ("aggregated",)  # active devices are pulled after training
    offline: Tensor

    def __init__(
        self,
        servers: Count = 10,
        active: Count = 3,
        available: Count = 8,
        gamma: Weight | list[Weight] = 0.2,
        patience: Count = 4,
        **fedbcd: Any,
    ) -> None:
        """FedBCD's arguments, and who trains offline; only active devices are in a server's step.

        Args:
            servers: See FedBCD.
            active: See FedBCD.
            available: |Q~_n|, number of devices per server that train in a phase, including the
                active ones.
            gamma: See FedBCD; a pull is x <- x - gamma (x - z), K times.
            patience: Number of offline rounds after which a device pauses until it is active; one
                more with `compatibility`, as in the released code.
            **fedbcd: See FedBCD.
        """
        super().__init__(servers, active, gamma=gamma, **fedbcd)
        self.hierarchy = replace(self.hierarchy, available=available)
        self.patience = patience + self.compatibility
        self._connected: dict[int, int] = {}  # active devices of this round -> K

    @override
    def _stepped(self, fed: Fleet) -> int:
        return self.hierarchy.active

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.register_buffer("offline", torch.zeros(fed.clients, dtype=torch.int64))

    @override
    def _devices(self, fed: Fleet, t: int) -> None:
        """Lines 2-6 of algorithm 2: train on g_i only, then pull the active devices."""
        phases = self._phases.values()
        units = {i: k for phase in phases for i, k in phase.units.items()}
        self._connected = {i: units[i] for phase in phases for i in phase.active}
        rounds = self.offline.tolist()
        training = [i for i in sorted(units) if rounds[i] < self.patience]
        fed.train(
            training, t, steps=self.hierarchy.batches({i: units[i] for i in training}, fed.data, t)
        )
        self.offline[training] += 1
        self.offline[sorted(self._connected)] = 0
        for client in fed.mine(sorted(self._connected)):
            self._pull(fed, client, self._connected[client])

    def _pull(self, fed: Fleet, client: int, times: int) -> None:
        """Repeat x <- clamp(x - gamma (x - z), box)."""
        floats = fed.row(client).floats
        model = self.clouds.of(self.hierarchy.server_of(client, fed.clients))
        views = model.layout.floats.views
        here, there = views(floats), views(model.floats.to(floats.device))
        box = fed.state(client).session.box
        module = fed.state(client).module
        for name in [n for n, p in module.named_parameters() if p.requires_grad]:
            x, z = here[name], there[name]
            for _ in range(times):
                x.sub_(x - z, alpha=self.gamma(client))
                if box is not None:
                    x.clamp_(*box)

    @override
    def penalty(self, client: int) -> float:
        return 0.0

    @override
    def _stored(self, fed: Fleet, servers: list[int]) -> tuple[list[int], list[int]]:
        _, sent = super()._stored(fed, servers)
        return sent, sent
