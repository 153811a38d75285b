"""Clients that send a vector per class instead of weights: FD, FedProto, FedTGP, FedGH."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.class_means import ClassMeans, ClassSums, mean_of_clients
from lightfed.algorithms.prototypes.prototype import ClassClient
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec
from lightfed.models.client_module import ClientModule
from lightfed.models.split import SplitNetwork, evaluating
from lightfed.utils.bounds import Weight
from lightfed.utils.errors import require
from lightfed.utils.rng import torch_generator

Absent = Literal["keep", "forget"]


class ByClass(Algorithm):
    """The server's vector of a class is the plain mean over the participants that hold it."""

    stateful = True
    no_server_step = "clients send vectors of classes, and no models"
    side_by_side = True
    values: Tensor  # (C, D)
    seen: Tensor  # (C,)

    def __init__(self, weight: Weight = 1.0, absent: Absent = "keep") -> None:
        """Set the weight of the server's vectors in a client's loss, and how long they are kept.

        Args:
            weight: lambda, 0 or more.
            absent: Keep the last vector of a class that no participant of a round holds, or forget
                it, as in HtFLlib.
        """
        super().__init__()
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
        clients = fed.participants(t)
        fed.charge(clients, down=self.common.bytes)
        fed.train(clients, t)
        packages = uploads(fed, self.packages(fed, clients))
        if packages:
            self.learn(fed, t, packages)

    def packages(self, fed: Fleet, clients: Sequence[int]) -> dict[int, ClassMeans]:
        """What the participants on this rank send: here what their sessions have gathered."""
        return {k: ClassMeans(self._values[k], self._seen[k]) for k in self._values}

    def learn(self, fed: Fleet, t: int, packages: Sequence[ClassMeans]) -> None:
        """The server's new vectors, from the participants' packages."""
        mean = mean_of_clients(packages)  # in host memory
        older = self.common.to(mean.values.device)
        self.take(mean.over(older) if self.absent == "keep" else mean)

    def take(self, common: ClassMeans) -> None:
        """Replace the server's vectors."""
        self.values.copy_(common.values)
        self.seen.copy_(common.seen)

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


def uploads(fed: Fleet, packages: Mapping[int, ClassMeans]) -> list[ClassMeans]:
    """The usable packages of all ranks, in ascending order of the clients; counts their bytes."""
    host = torch.device("cpu")
    found = fed.collect({k: p.to(host) for k, p in packages.items()})
    for client, package in found.items():
        fed.ledger.sent_up(client, package.bytes)
    return [package for client, package in found.items() if fed.usable(client)]


def trained_means(fed: Fleet, clients: Sequence[int], part: str) -> dict[int, ClassMeans]:
    """Mean features by class of this rank's clients after their sessions.

    A pass in evaluation mode over all training samples, which is counted as one of the whole
    network. `part` names the `SplitNetwork` in a client's module.
    """
    found: dict[int, ClassMeans] = {}
    for k in clients:
        fed.ledger.computed(k, fed.state(k).flops * fed.data.num_samples(k))
    for k in filter(fed.usable, fed.mine(clients)):
        net = fed.bind(k).get_submodule(part)
        assert isinstance(net, SplitNetwork)
        shape = fed.data.num_classes, net.feature_dim + 1
        table = torch.zeros(shape, dtype=torch.float64, device=fed.device)
        sums = ClassSums(table[:, 1:], table[:, 0])
        with evaluating(net), torch.no_grad():
            for x, y in fed.data.batches(fed.data.client_plan(k, fed.data.batch_size)):
                sums.add(y, net.extractor(x))
        found[k] = sums.means()
    return found


class ServerSGD:
    """A server's training on the clients' vectors, in batches as large as the clients'.

    `lr` is the rate, `epochs` the number of passes over a round's vectors.
    """

    def __init__(self, lr: float, epochs: int) -> None:
        self.lr, self.epochs = lr, epochs

    def of(
        self,
        fed: Fleet,
        t: int,
        packages: Sequence[ClassMeans],
        parameters: Mapping[str, Tensor],
        loss: Callable[[dict[str, Tensor], Tensor, Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """Trained copies of the parameters, on the CPU; one rank trains for all.

        `loss` is of the parameters by name, (B, D) vectors and their (B,) classes.
        """
        values = torch.cat([package.values[package.seen] for package in packages])
        labels = torch.cat([package.seen.nonzero()[:, 0] for package in packages])

        def train() -> dict[str, Tensor]:
            leaves = {n: p.detach().cpu().clone().requires_grad_() for n, p in parameters.items()}
            optimizer = SGD(leaves.values(), lr=self.lr)
            draw = torch_generator(fed.seed, "means", t)
            for _ in range(self.epochs):
                order = torch.randperm(len(labels), generator=draw)
                for index in order.split(fed.data.batch_size):
                    optimizer.zero_grad()
                    with torch.enable_grad():
                        loss(leaves, values[index], labels[index]).backward()
                    optimizer.step()
            return {name: leaf.detach() for name, leaf in leaves.items()}

        return next(fed.once([train]))
