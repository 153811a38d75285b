"""Servers of a cloud and their devices: the base of FedBCD and of its baselines.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import add

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

    Servers do so in parallel; communication between them takes no time.
    """

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
            steps: Bounds of K, the length of a session, drawn for every activation.
            unit: What K counts: steps (mini-batches) or epochs.
            activation: Random active devices, or those that wake up first (after the delay of
                `model.devices`, which is Exponential(mean=1) by default), as in the released code's
                second experiment.
        """
        super().__init__()
        bounds = steps[0], steps[1]
        self.hierarchy = Hierarchy(servers, active, active, bounds, unit, activation=activation)

    def set_up_clouds(self, fed: Fleet) -> None:
        """Check the hierarchy and take the devices' delays."""
        self.hierarchy.check(fed.clients, fed.work)
        given = clock_of(fed).devices
        self.hierarchy = replace(self.hierarchy, delay=given.delay, step_delay=given.step_delay)

    def busy(self, fed: Fleet, phases: Sequence[Phase], t: int) -> list[float]:
        """Virtual seconds of phases whose devices have trained: those of the slowest active one."""
        layout = fed.groups[0].layout
        size = 4 * layout.floats.numel + 8 * layout.integers.numel
        ends = []
        for phase in phases:
            up = [size * self.sends(k) for k in phase.active]
            seconds = clock_of(fed).session_seconds(phase.active, up=up, purpose=None).tolist()
            ends.append(max(map(add, seconds, phase.delays.values())))
        return ends

    def sends(self, client: int) -> bool:
        """Whether an active device sends its model."""
        return True

    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        """Q_n, K_i and the duration."""
        return self.hierarchy.phase(server, t, clients=fed.clients, seed=fed.seed)


class CloudModels(nn.ModuleList):
    """z_n: a model per server, or a single one if all have the same."""

    def __init__(self, fed: Fleet, count: int) -> None:
        super().__init__(fed.new_model() for _ in range(count))

    def of(self, server: int) -> ServerModel:
        """The model of a server."""
        model = self[server if len(self) > 1 else 0]
        assert isinstance(model, ServerModel)
        return model

    def stacked(self) -> Tensor:
        """(N, P) float64: the servers' rows, or the one of all."""
        return torch.stack([self.of(n).floats.double() for n in range(len(self))])

    def mixed(self, first: Sequence[int], mixing: np.ndarray | None) -> list[Tensor]:
        """w_n = sum_m a_nm z_m of the servers `first` that were waited for (Wu et al., eq. 6a).

        `mixing` is (N, N) a_nm; None for 1 / B among those servers.
        """
        models = self.stacked()
        if mixing is None:
            mean = models[list(first)].mean(0).float()
            return [mean] * len(first)
        weights = torch.from_numpy(mixing).to(models.device)
        return list((weights @ models).float())


def show(fed: Fleet, model: ServerModel, clients: Sequence[int]) -> None:
    """Count the bytes of clients that read a server's model; their rows do not change."""
    fed.ledger.sent_down(clients, fed.sizes(model, clients))


def relay(fed: Fleet, model: ServerModel, times: int) -> None:
    """Count the bytes of servers that send a model to or from a coordinator or each other."""
    size = 4 * model.layout.floats.numel + 8 * model.layout.integers.numel
    fed.ledger.sent_between_servers(times * size)
