"""FedBCD-I: FedBCD with devices that train offline and are pulled when they connect.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900

Algorithm 2 treats the cost and the pull of problem (2) one after the other:

    lines 2-4:  K ASPG steps on g_i(x_i) alone, at all available devices, i in Q~_n
    lines 5-6:  x_i <- clamp(x_i - gamma_i (x_i - z_n)), K times, at the active ones, i in Q_n

More devices train than connect to their server, Q_n in Q~_n. A server steps only with the active
ones.

Choices where the paper is silent: a device that has trained offline for `patience` rounds pauses
until it is active, and is then pulled without training. Momentum is that of the training steps, not
of the pulls. The released code lets a device train for one more round (`compatibility`).
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
    offline: Tensor  # (clients,) rounds of training since a device was active

    def __init__(
        self,
        servers: Count = 10,
        active: Count = 3,
        available: Count = 8,
        gamma: Weight | list[Weight] = 0.2,
        patience: Count = 4,
        **fedbcd: Any,
    ) -> None:
        """Set FedBCD's arguments, and who trains offline.

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
        self.patience = patience + 1 if self.compatibility else patience

    @override
    def _devices_in_a_step(self, fed: Fleet) -> int:
        return self.hierarchy.active

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.register_buffer("offline", torch.zeros(fed.clients, dtype=torch.int64))

    @override
    def _train_devices(self, fed: Fleet, t: int) -> None:
        """Lines 2-6 of algorithm 2: train on g_i only, then pull the active devices."""
        units: dict[int, int] = {}  # K by available device
        connected: dict[int, int] = {}  # K by active device
        for phase in self._phases.values():
            units |= phase.units
            for device in phase.active:
                connected[device] = phase.units[device]

        rounds_offline = self.offline.tolist()
        training = [i for i in sorted(units) if rounds_offline[i] < self.patience]
        lengths = {device: units[device] for device in training}
        fed.train(training, t, steps=self.hierarchy.batches(lengths, fed.data, t))

        active = sorted(connected)
        self.offline[training] += 1
        self.offline[active] = 0
        for device in fed.mine(active):
            self._pull(fed, device, times=connected[device])

    def _pull(self, fed: Fleet, client: int, times: int) -> None:
        """Repeat x <- clamp(x - gamma (x - z), box)."""
        state = fed.state(client)
        row = fed.row(client).floats
        model = self.clouds.of(self.hierarchy.server_of(client, fed.clients))
        views = model.layout.floats.views
        values_of_x = views(row)
        values_of_z = views(model.floats.to(row.device))
        box = state.session.box
        for name, parameter in state.module.named_parameters():
            if not parameter.requires_grad:
                continue
            x = values_of_x[name]
            z = values_of_z[name]
            for _ in range(times):
                x.sub_(x - z, alpha=self.gamma(client))
                if box is not None:
                    x.clamp_(*box)

    @override
    def penalty(self, client: int) -> float:
        return 0.0  # devices train on g_i alone

    @override
    def _stored(self, fed: Fleet, servers: list[int]) -> tuple[list[int], list[int]]:
        # Only the active devices are in a server's step.
        _, sent = super()._stored(fed, servers)
        return sent, sent
