"""Clients that train a private network and a shared one; only the shared one is sent.

This is the base of pFedMoE, FML, FedKD, FedMRL and FedAPEN. The client's module becomes a composite
with a part `shared` and others, such as `private`. The server has a model of the tensors below
`shared`. It is sent to the participants, and becomes the mean of their trained copies:

    theta_k <- theta, trained together with the client's own parts
    theta <- sum_k n_k / n theta_k
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import lightning.pytorch as L
from torch import nn
from typing_extensions import override

from lightfed.api.algorithm import KEY, Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.models.build import DataSpec, build_network
from lightfed.models.client_module import ClientModule
from lightfed.state.rows import ModelKind, Moment, Rows
from lightfed.state.server_model import ServerModel

PREFIX = "net.shared."

NetworkFactory = Callable[[], nn.Module]


class PersonalShared(Algorithm):
    """A private and a shared network; `composite` defines how they train together."""

    stateful = True
    moments: tuple[Moment, ...] = ("trained", "aggregated")
    holds = "its own parts with the shared network"
    model: ServerModel  # the shared network

    def __init__(self, shared: NetworkFactory, weights: Weights = "samples") -> None:
        """Set the shared network.

        Args:
            shared: The network that all clients have in addition to their own.
            weights: Weights of the participants in the mean: by samples, or uniform.
        """
        super().__init__()
        self.shared = shared
        self.weights: Weights = weights

    @abstractmethod
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        """Return the client's network.

        It has an attribute `shared`; a method `losses(x, y)`, which gives losses by the names of
        the parts; and `clipped_separately`, the parts that are clipped as separate networks.
        """

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        client = ClientModule.of(module, method=type(self).__name__)
        shared = build_network(self.shared, data, key=f"{KEY}.shared")
        client.net = self.composite(client.net, shared, data)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """Return the clients' rows; "aggregated" they have the server's shared network."""
        if kind == "aggregated" and "trained" in self.moments:
            return fed.rows(clients, given=self.model)
        return super().models(fed, kind, clients)

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_part(PREFIX)  # theta_0

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # S_t
        fed.send(self.model, clients)  # theta_k <- theta
        fed.train(clients, t)  # all parts of a client at once
        fed.merge(clients, into=self.model, weights=self.weights)  # theta <- sum_k n_k / n theta_k
