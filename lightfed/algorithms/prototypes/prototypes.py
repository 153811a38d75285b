"""Federations whose clients send a vector per class instead of weights.

`ByClass` is the base of FD, FedProto and FedTGP. The functions below it are used by FedGH, too.
"""

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
from lightfed.utils.errors import UserError
from lightfed.utils.rng import torch_generator

Absent = Literal["keep", "forget"]


class ByClass(Algorithm):
    """The server's vector of a class is the plain mean over the participants that hold it.

    Attributes:
        values: The server's vectors, (C, D).
        seen: Which classes have one, (C,) bool.
        uploaded_values: What the participants of this round upload: vectors, (C, D) by client.
        uploaded_seen: Which classes these are, (C,) bool by client.
    """

    stateful = True
    no_late = "clients send vectors of classes, which are no changes of a model"
    no_server_step = "clients send vectors of classes, and no models"
    side_by_side = True
    values: Tensor
    seen: Tensor

    def __init__(self, weight: Weight = 1.0, absent: Absent = "keep") -> None:
        """Set the weight of the server's vectors in a client's loss, and how long they are kept.

        Args:
            weight: lambda, 0 or more.
            absent: Whether the server keeps the last vector of a class that no participant of a
                round holds, or forgets it, as in HtFLlib.
        """
        super().__init__()
        self.weight = weight
        self.absent: Absent = absent

    @abstractmethod
    def client(self, net: nn.Module, data: DataSpec) -> ClassClient:
        """Return the client's network around a configured one."""

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        client = ClientModule.of(module, method=type(self).__name__)
        client.net = self.client(client.net, data)

    @override
    def setup(self, fed: Fleet) -> None:
        first = fed.groups[0]
        classes, size = self._client_of(first.module).shape
        for group in fed.groups[1:]:
            _, other_size = self._client_of(group.module).shape
            if other_size != size:
                raise UserError(
                    "model.clients",
                    f"group {first.name} gives vectors of {size} numbers, group {group.name} of "
                    f"{other_size}",
                    "use networks with the same number of features",
                )

        self.register_buffer("values", torch.zeros(classes, size))
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.bool))
        self.uploaded_values = fed.keep("values", durable=False)
        self.uploaded_seen = fed.keep("seen", durable=False)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.charge(clients, down=self.common.bytes)  # they read it in `session_start`
        fed.train(clients, t)
        packages = uploads(fed, self.packages(fed, clients))
        if packages:
            self.learn(fed, t, packages)

    def packages(self, fed: Fleet, clients: Sequence[int]) -> dict[int, ClassMeans]:
        """Return what the participants on this rank send: here what their sessions gathered."""
        uploaded = {}
        for client, values in self.uploaded_values.items():
            uploaded[client] = ClassMeans(values, self.uploaded_seen[client])
        return uploaded

    def learn(self, fed: Fleet, t: int, packages: Sequence[ClassMeans]) -> None:
        """Make the server's new vectors from the participants' packages."""
        mean = mean_of_clients(packages)  # in host memory
        if self.absent == "keep":
            mean = mean.over(self.common.to(mean.values.device))
        self.take(mean)

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
        self.uploaded_values[s.client] = upload.values
        self.uploaded_seen[s.client] = upload.seen

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
    """Return the usable packages of all ranks in ascending order of clients; count their bytes.

    Args:
        fed: The federation.
        packages: Those of this rank, by client.
    """
    host = torch.device("cpu")
    on_host = {client: package.to(host) for client, package in packages.items()}
    usable = []
    for client, package in fed.collect(on_host).items():
        fed.ledger.sent_up(client, package.bytes)
        if fed.usable(client):
            usable.append(package)
    return usable


def trained_means(fed: Fleet, clients: Sequence[int], part: str) -> dict[int, ClassMeans]:
    """Return mean features by class of this rank's clients after their sessions.

    This takes a pass in evaluation mode over all training samples. Its FLOPs are counted as those
    of the whole network.

    Args:
        fed: The federation.
        clients: The participants.
        part: Name of the `SplitNetwork` in a client's module.
    """
    for client in clients:
        fed.ledger.computed(client, fed.state(client).flops * fed.data.num_samples(client))

    means: dict[int, ClassMeans] = {}
    for client in fed.mine(clients):
        if not fed.usable(client):
            continue
        network = fed.bind(client).get_submodule(part)
        assert isinstance(network, SplitNetwork)

        # Of each class the number of its samples, then the sum of their features.
        shape = (fed.data.num_classes, network.feature_dim + 1)
        table = torch.zeros(shape, dtype=torch.float64, device=fed.device)
        sums = ClassSums(table[:, 1:], table[:, 0])
        plan = fed.data.client_plan(client, fed.data.batch_size)
        with evaluating(network), torch.no_grad():
            for x, y in fed.data.batches(plan):
                sums.add(y, network.extractor(x))
        means[client] = sums.means()
    return means


class ServerSGD:
    """Trains the server on the clients' vectors, in batches as large as the clients'.

    Args:
        lr: Learning rate.
        epochs: Number of passes over a round's vectors.
    """

    def __init__(self, lr: float, epochs: int) -> None:
        self.lr = lr
        self.epochs = epochs

    def of(
        self,
        fed: Fleet,
        t: int,
        packages: Sequence[ClassMeans],
        parameters: Mapping[str, Tensor],
        loss: Callable[[dict[str, Tensor], Tensor, Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """Return trained copies of the parameters, on the CPU; one rank trains for all.

        Args:
            fed: The federation.
            t: The round, which names the order of the vectors.
            packages: The clients' vectors.
            parameters: What is trained, by name.
            loss: Gives the loss of parameters by name on vectors (B, D) and their classes (B,).
        """
        values = torch.cat([package.values[package.seen] for package in packages])
        labels = torch.cat([package.seen.nonzero()[:, 0] for package in packages])

        def train() -> dict[str, Tensor]:
            leaves = {}
            for name, parameter in parameters.items():
                leaves[name] = parameter.detach().cpu().clone().requires_grad_()
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
