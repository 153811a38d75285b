"""Clients that exchange a vector per class instead of weights: the base of FD and FedProto."""

from abc import abstractmethod
from math import inf
from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.api.algorithm import Algorithm, require_argument
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec
from lightfed.models.client_module import ClientModule
from lightfed.models.composites.class_means import ClassMeans, mean_of_clients
from lightfed.models.composites.prototype import ClassClient
from lightfed.utils.errors import require

Absent = Literal["keep", "forget"]


class ByClass(Algorithm):
    """The server's vector of a class is the plain mean over the participants that hold it."""

    stateful = True
    no_server_step = "clients send vectors of classes, and no models"
    side_by_side = True
    values: Tensor  # (C, D)
    seen: Tensor  # (C,)

    def __init__(self, weight: float = 1.0, absent: Absent = "keep") -> None:
        """Set the weight of the server's vectors in a client's loss, and how long they are kept.

        Args:
            weight: lambda, 0 or more.
            absent: Keep the last vector of a class that no participant of a round holds, or forget
                it, as in HtFLlib.
        """
        super().__init__()
        require_argument(0 <= weight < inf, "weight", weight, "give a weight of 0 or more")
        self.weight = weight
        self.absent: Absent = absent

    @abstractmethod
    def client(self, net: nn.Module, data: DataSpec) -> ClassClient:
        """The client's network around a configured one."""

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        client = ClientModule.of(module, method=type(self).__name__)
        client.net = self.client(client.net, data)

    @override
    def setup(self, fed: Fleet) -> None:
        sizes = {state.name: self._client_of(state.module).shape for state in fed.groups}
        (first, (classes, size)), *others = sizes.items()
        for name, (_, other) in others:
            found = f"group {first} gives vectors of {size} numbers, group {name} of {other}"
            fix = "use networks with the same number of features"
            require(other == size, "model.clients", found, fix)
        self.register_buffer("values", torch.zeros(classes, size))
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.bool))
        self._values = fed.keep("values", durable=False)  # uploads of the round
        self._seen = fed.keep("seen", durable=False)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients, host = fed.participants(t), torch.device("cpu")
        common = self.common.to(host)
        for client in clients:
            fed.ledger.sent_down(client, common.bytes)
        fed.train(clients, t)
        uploads = {k: ClassMeans(self._values[k], self._seen[k]) for k in self._values}
        packages = fed.collect({k: p.to(host) for k, p in uploads.items()})
        for client, package in packages.items():
            fed.ledger.sent_up(client, package.bytes)
        finite = [package for client, package in packages.items() if fed.usable(client)]
        if finite:
            mean = mean_of_clients(finite)
            if self.absent == "keep":
                mean = mean.over(common)
            self.values.copy_(mean.values)
            self.seen.copy_(mean.seen)

    @property
    def common(self) -> ClassMeans:
        """The server's vectors."""
        return ClassMeans(self.values, self.seen)

    @override
    def session_start(self, s: SessionContext) -> None:
        self._client_of(s.module).receive(self.common)

    @override
    def session_end(self, s: SessionContext) -> None:
        upload = self._client_of(s.module).upload()
        self._values[s.client], self._seen[s.client] = upload.values, upload.seen

    @override
    def evaluation_start(self, fed: Fleet) -> None:
        for state in fed.groups:
            self._client_of(state.module).receive(self.common)

    @staticmethod
    def _client_of(module: L.LightningModule) -> ClassClient:
        assert isinstance(module, ClientModule)
        assert isinstance(module.net, ClassClient)
        return module.net
