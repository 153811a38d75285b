"""Servers of a cloud and their devices: the base of FedBCD and of its baselines.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from lightfed.algorithms.fedbcd.hierarchy import Activation, Hierarchy, Phase, Unit
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.devices.delays import Exponential
from lightfed.devices.devices import Devices
from lightfed.devices.timing import Timing, clock_of
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count


class Hierarchical(Algorithm):
    """Each server has active devices, which train for K steps or epochs.

    Servers work in parallel. Communication between them takes no time.
    """

    no_unseen = "servers choose their devices by their numbers"
    no_policy = "a server waits for its active devices, and the coordinator for some servers"
    timing = Timing(Devices(delay=Exponential(1.0)))

    no_personal = "servers exchange whole models"
    no_kept_optimizer = "devices have a rule of their own for momentum"

    def __init__(
        self,
        servers: Count = 10,
        active: Count = 3,
        steps: tuple[Count, Count] = (1, 5),
        unit: Unit = "step",
        activation: Activation = "uniform",
    ) -> None:
        """Set the servers, their devices and the length of sessions.

        Args:
            servers: N; the clients are split among them equally, in order, as devices.
            active: |Q_n|, number of devices per server that communicate with it in a phase.
            steps: Bounds of K, the length of a session, which is drawn whenever a device is active.
            unit: What K counts: steps (mini-batches) or epochs.
            activation: Whether the active devices are drawn, or are those that wake up first, as in
                the released code's second experiment. A device wakes up after the delay of
                `model.devices`, which is Exponential(mean=1) by default.
        """
        super().__init__()
        self.hierarchy = Hierarchy(
            servers,
            active,
            available=active,
            steps=(steps[0], steps[1]),  # a configuration gives a list
            unit=unit,
            activation=activation,
        )

    def set_up_clouds(self, fed: Fleet) -> None:
        """Check the hierarchy and take the devices' delays."""
        self.hierarchy.check(fed.clients, fed.work)
        devices = clock_of(fed).devices
        self.hierarchy = replace(self.hierarchy, delay=devices.delay, step_delay=devices.step_delay)

    def busy(self, fed: Fleet, phases: Sequence[Phase], t: int) -> list[float]:
        """Return how long each of these phases lasts, in virtual seconds; its devices have trained.

        A server waits for its slowest active device.
        """
        layout = fed.groups[0].layout
        size = 4 * layout.floats.numel + 8 * layout.integers.numel
        durations = []
        for phase in phases:
            up = [size if self.sends(device) else 0 for device in phase.active]
            seconds = clock_of(fed).session_seconds(phase.active, up=up, purpose=None).tolist()
            delays = phase.delays.values()
            ends = [work + delay for work, delay in zip(seconds, delays, strict=True)]
            durations.append(max(ends))
        return durations

    def sends(self, client: int) -> bool:
        """Return whether an active device sends its model."""
        return True

    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        """Return Q_n, K_i and the delays of a phase that server n starts in round t."""
        return self.hierarchy.phase(server, t, clients=fed.clients, seed=fed.seed)


class CloudModels(nn.ModuleList):
    """z_n: a model for each server, or a single one if all servers have the same."""

    def __init__(self, fed: Fleet, count: int) -> None:
        super().__init__(fed.new_model() for _ in range(count))

    def of(self, server: int) -> ServerModel:
        """Return the model of a server."""
        position = server if len(self) > 1 else 0
        model = self[position]
        assert isinstance(model, ServerModel)
        return model

    def stacked(self) -> Tensor:
        """Return the servers' rows, (N, P) float64; (1, P) if all have the same."""
        return torch.stack([self.of(n).floats.double() for n in range(len(self))])

    def mixed(self, first: Sequence[int], mixing: np.ndarray | None) -> list[Tensor]:
        """Return w_n = sum_m a_nm z_m for the servers that were waited for (Wu et al., eq. 6a).

        Args:
            first: The B servers that were waited for.
            mixing: a_nm, (N, N), if all servers are waited for; None for 1 / B among those servers.

        Returns:
            A vector of shape (P,) for each of the servers.
        """
        models = self.stacked()
        if mixing is None:
            mean = models[list(first)].mean(0).float()
            return [mean] * len(first)
        weights = torch.from_numpy(mixing).to(models.device)
        return list((weights @ models).float())


def show(fed: Fleet, model: ServerModel, clients: Sequence[int]) -> None:
    """Count the bytes of clients that receive a server's model; their rows do not change."""
    fed.ledger.sent_down(clients, fed.sizes(model, clients))


def relay(fed: Fleet, model: ServerModel, times: int) -> None:
    """Count the bytes of a model that is sent `times` times between servers and a coordinator."""
    size = 4 * model.layout.floats.numel + 8 * model.layout.integers.numel
    fed.ledger.sent_between_servers(times * size)
