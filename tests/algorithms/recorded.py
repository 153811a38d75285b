"""Recorded federations of the second circle: their data, batches and participants.

The recordings in tests/golden were made with the authors' code, or with a library's.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.data.batches import Plan
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.state.rows import ModelLayout
from tests.small import GOLDEN, Given, Tensors, fleet_of, run_round

# The recorded code adds in another order.
close = partial(torch.testing.assert_close, rtol=0, atol=3e-6)


def settings_of(folder: str, name: str) -> dict[str, Any]:
    """Return what is recorded besides tensors."""
    settings: dict[str, Any] = json.loads((GOLDEN / folder / f"{name}.json").read_text())
    return settings


class Net(nn.Module):
    """Linear layers fc1, fc2, ... with ReLU between them."""

    def __init__(self, dims: list[int]) -> None:
        super().__init__()
        self.count = len(dims) - 1
        for i in range(self.count):
            self.add_module(f"fc{i + 1}", nn.Linear(dims[i], dims[i + 1]))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, self.count):
            x = torch.relu(self.get_submodule(f"fc{i}")(x))
        return self.get_submodule(f"fc{self.count}")(x)


class Images(nn.Module):
    """Convolutions conv1, conv2, ... with ReLU and pooling, the mean over pixels, and fc."""

    def __init__(self, channels: list[int], classes: int) -> None:
        super().__init__()
        self.count = len(channels) - 1
        for i, (inputs, outputs) in enumerate(pairwise(channels), 1):
            self.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, 3, padding=1))
        self.fc = nn.Linear(channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, self.count + 1):
            x = F.max_pool2d(torch.relu(self.get_submodule(f"conv{i}")(x)), 2)
        return self.fc(x.mean((2, 3)))


class InOrder(FederatedDataModule):
    """A client's batches in the recorded order.

    They begin with the batch `first[client]` of the round and go around.
    """

    first: Mapping[int, int] = {}

    def train_plan(  # type: ignore[override]
        self, client: int, *, limit: int | None = None, **_: Any
    ) -> Plan:
        batches = torch.from_numpy(self.partition_.train(client)).split(self.batch_size)
        start = self.first.get(client, 0)
        turned = [*batches[start:], *batches[:start]][:limit]
        return Plan(torch.cat(turned), [len(batch) for batch in turned], None)


class Recorded:
    """A federation that trains as the recorded one did.

    Args:
        folder: The folder of the algorithm.
        name: The name of the recording.
        algorithm: The algorithm to compare.
        groups: The clients. By default all have the recorded perceptron. Clients that the recording
            lacks come first and never take part.
        optimizer: Makes the optimizer from the parameters and lr. By default SGD with the recorded
            settings.
        names: The names of layers in the recorded tensors, where they differ from the network's.
        **work: The length of sessions, if it is not in the recording's `local_epochs`.

    Attributes:
        about: What is recorded besides tensors.
        tensors: The recorded tensors.
        data: The clients' data.
        fleet: The clients.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        algorithm: Algorithm,
        groups: Sequence[ClientGroup] | None = None,
        *,
        optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer] | None = None,
        names: Mapping[str, str] | None = None,
        **work: int,
    ) -> None:
        self.names = names or {}
        self.about = settings_of(folder, name)
        self.tensors = load_file(GOLDEN / folder / f"{name}.safetensors")

        recorded_clients = len(self.about["batches"])
        if groups is None:
            groups = [ClientGroup(recorded_clients, self._network())]
        self.spare = sum(group.count for group in groups) - recorded_clients
        self.data = self._data(recorded_clients)

        # APFL's recordings name the optimizer of the personal model.
        rule = self.about.get("optimizer") or {"lr": self.about["inner_optimizer"]["plr"]}
        self.lr = rule["lr"] if "lr" in rule else rule["lr0"]
        if optimizer is None:
            optimizer = partial(
                SGD, momentum=rule.get("momentum", 0.0), weight_decay=rule.get("weight_decay", 0.0)
            )
        self.fleet: Fleet = fleet_of(
            list(groups),
            algorithm,
            self.data,
            optimizer=partial(optimizer, lr=self.lr),
            clip=rule.get("grad_norm_clip"),
            **(work or {"epochs": self.about.get("local_epochs", 1)}),
        )
        self.fleet.plan = RoundPlan(lr=self.lr)
        model: Any = algorithm.get_submodule("model")
        self._start(model.floats, model.layout)

    def _network(self) -> Callable[[], nn.Module]:
        """Return what makes the recorded network."""
        model = self.about["model"]
        if "channels" in model:
            channels = [model["input"][0], *model["channels"]]
            return partial(Images, channels, model["classes"])
        return partial(Net, model["dims"])

    def _data(self, recorded_clients: int) -> InOrder:
        """Return the recorded samples; spare clients have those of the first."""
        owners = [0] * self.spare + list(range(recorded_clients))
        samples = [self.tensors[f"data/{k}/x"] for k in owners]
        labels = [self.tensors[f"data/{k}/y"].long() for k in owners]
        x = torch.cat(samples)
        y = torch.cat(labels)

        ends = torch.tensor([len(of_client) for of_client in labels]).cumsum(0).tolist()
        parts = [range(start, end) for start, end in pairwise([0, *ends])]

        model = self.about["model"]
        classes = model["classes"] if "classes" in model else model["dims"][-1]
        return InOrder(
            Tensors(x, y, classes=classes, test=(x, y)),
            Given(*parts),
            batch_size=self.about["batch_size"],
        )

    def _start(self, server: Tensor, layout: ModelLayout) -> None:
        """Set the recorded initial values: the server's, and those of clients that keep a model."""
        if layout != self.fleet.groups[0].layout:
            return
        server.copy_(self.row("init"))
        if self.fleet.algorithm.stateful or self.fleet.personal:
            for client in range(self.fleet.clients):
                if self.fleet.state(client).layout == layout:
                    self.fleet.row(client).floats.copy_(server)

    def rounds(self, patch: pytest.MonkeyPatch, start: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Run the recorded rounds; after each, yield its number and its participants.

        Args:
            patch: Replaces the draw of participants.
            start: The number of the first round in the run.
        """
        for t, recorded in enumerate(self.about["rounds"]):
            everyone = range(len(self.about["batches"]))
            active = recorded.get("active", recorded.get("selected", everyone))
            clients = sorted(k + self.spare for k in active)
            patch.setattr(Fleet, "participants", lambda self, t, clients=clients: clients)

            # By client, or a list of all clients'.
            first = recorded.get("first_batch", {})
            first_of = dict(first.items() if isinstance(first, dict) else enumerate(first))
            self.data.first = {int(k) + self.spare: batch for k, batch in first_of.items()}

            self.fleet.plan = RoundPlan(lr=recorded.get("lr", self.lr))
            run_round(self.fleet, start + t)
            yield t, clients

    def row(self, prefix: str, group: int = 0) -> Tensor:
        """Return recorded tensors as a row (P,) of a group; those that are not recorded are 0."""
        layout = self.fleet.groups[group].layout
        row = layout.floats.new_row()
        for name, view in layout.floats.views(row).items():
            layer, _, kind = name.removeprefix("net.").rpartition(".")
            recorded_layer = self.names.get(layer, layer)
            recorded = self.tensors.get(f"{prefix}/{recorded_layer}.{kind}")
            if recorded is not None:
                view.copy_(recorded)
        return row
