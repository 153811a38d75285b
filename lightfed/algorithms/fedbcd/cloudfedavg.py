"""FedAvg and FedProx in FedBCD's hierarchy: servers with devices, one model for all, sync.

The baselines of Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, as in its released code. In every round each server n has |Q_n|
active devices. All of them start from the global model and train K mini-batches:

    w_i <- w,  then K steps along  grad g_i(w_i) + mu (w_i - w)
    w <- mean of w_i over all active devices

With mu = 0 this is FedAvg, with mu > 0 FedProx, which the paper trains with ASPG. Every server
sends the mean of its devices to the coordinator, and receives the global model.

Deviation: in the released FedProx, SGD's momentum passes from device to device. Here sessions start
without momentum.
"""

from typing import Any

from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.clouds import Hierarchical, relay
from lightfed.api.fleet import Fleet
from lightfed.devices.timing import clock_of
from lightfed.local.hooks import SessionContext
from lightfed.local.optimizer import Proximal
from lightfed.utils.bounds import Count, Weight


class CloudFedAvg(Hierarchical, FedAvg):
    """The new w is the mean of the active devices' models, each of them K steps away from w."""

    side_by_side = True

    def __init__(
        self, servers: Count = 10, active: Count = 3, mu: Weight = 0.0, **hierarchy: Any
    ) -> None:
        """The clouds, and the pull.

        Args:
            servers: N; the clients are split among them equally, in order, as devices.
            active: |Q_n|, number of devices per server that train in a round.
            mu: Weight of the pull to the global model; 0 is FedAvg.
            **hierarchy: See Hierarchical.
        """
        super().__init__(servers, active, **hierarchy)
        self.mu = mu
        self.weights = "uniform"

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.set_up_clouds(fed)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        servers = range(self.hierarchy.servers)
        phases = [self.phase(fed, n, t) for n in servers]
        units: dict[int, int] = {}  # K_i by device
        for phase in phases:
            units |= phase.units
        devices = sorted(units)  # Q_n of all n

        fed.send(self.model, devices)  # w_i <- w
        fed.train(devices, t, steps=self.hierarchy.batches(units, fed.data, t))
        slowest = max(self.busy(fed, phases, t))
        fed.merge(devices, into=self.model, weights=self.weights)  # w <- mean of w_i
        relay(fed, self.model, self.hierarchy.messages(servers))

        # All servers wait for the slowest.
        clock = clock_of(fed)
        clock.advance_to(clock.now + slowest)

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        if self.mu == 0:
            return None
        return Proximal(self.model.parameters_row, self.mu)
