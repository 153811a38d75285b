"""FedAvg and FedProx in FedBCD's hierarchy: servers with devices, one model for all, sync.

The baselines of Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, as in its released code: each server has |Q_n| active devices, all
start from the global model, train K mini-batches, and the global model becomes their plain mean.
With mu > 0, mu (w - z) is added to the gradient, which is FedProx; the paper trains it with ASPG.
In the released FedProx, SGD's momentum passes from device to device; here sessions start without
it. Every server sends the mean of its devices to the coordinator and receives the global model.
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
    """The new w is the mean of the active devices' models, each K steps away from w."""

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
        phases = [self.phase(fed, n, t) for n in range(self.hierarchy.servers)]
        units = {i: k for phase in phases for i, k in phase.units.items()}
        devices = sorted(units)  # Q_n of all n
        fed.send(self.model, devices)  # w_i <- w
        fed.train(devices, t, steps=self.hierarchy.batches(units, fed.data, t))
        busy = max(self.busy(fed, phases, t))  # all wait for the slowest
        fed.merge(devices, into=self.model, weights=self.weights)
        relay(fed, self.model, self.hierarchy.messages(range(self.hierarchy.servers)))
        clock = clock_of(fed)
        clock.advance_to(clock.now + busy)

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        return Proximal(self.model.parameters_row, self.mu) if self.mu else None
