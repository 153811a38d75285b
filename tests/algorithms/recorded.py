"""Recorded federations of the second circle: their data, batches and participants."""

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

close = partial(torch.testing.assert_close, rtol=0, atol=3e-6)


def settings_of(folder: str, name: str) -> dict[str, Any]:
    """What is recorded besides tensors."""
    found: dict[str, Any] = json.loads((GOLDEN / folder / f"{name}.json").read_text())
    return found


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
    """A client's batches in the recorded order, from its first one of the round around."""

    first: Mapping[int, int] = {}

    def train_plan(  # type: ignore[override]
        self, client: int, *, limit: int | None = None, **_: Any
    ) -> Plan:
        batches = torch.from_numpy(self.partition_.train(client)).split(self.batch_size)
        start = self.first.get(client, 0)
        turned = [*batches[start:], *batches[:start]][:limit]
        return Plan(torch.cat(turned), [len(batch) for batch in turned], None)


class Recorded:
    """A federation that trains as the recorded one.

    Args:
        folder: of the algorithm.
        name: of the recording.
        algorithm: to compare.
        groups: of the clients; by default all have the recorded perceptron. Clients that the
            recording lacks come first and never take part.
        optimizer: of the run, from the parameters and lr; SGD with the recorded settings if None.
        names: of layers in the recorded tensors, where they differ from the network's.
        **work: the length of sessions, if it is not in `local_epochs`.

    Attributes:
        about: the settings.
        tensors: the recorded ones.
        data: of the clients.
        fleet: the clients.
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
        count, model = len(self.about["batches"]), self.about["model"]
        if groups is None:
            net: Callable[[], nn.Module] = partial(Net, model.get("dims", []))
            if "channels" in model:
                channels = [model["input"][0], *model["channels"]]
                net = partial(Images, channels, model["classes"])
            groups = [ClientGroup(count, net)]
        self.spare = sum(group.count for group in groups) - count
        given = [[self.tensors[f"data/{k}/{name}"] for name in "xy"] for k in range(count)]
        parts = [(x, y.long()) for x, y in given[:1] * self.spare + given]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        ends = torch.tensor([len(labels) for _, labels in parts]).cumsum(0).tolist()
        owned = [range(a, b) for a, b in pairwise([0, *ends])]
        classes = model["classes"] if "classes" in model else model["dims"][-1]
        data = self.data = InOrder(
            Tensors(x, y, classes=classes, test=(x, y)),
            Given(*owned),
            batch_size=self.about["batch_size"],
        )
        rule = self.about.get("optimizer") or {"lr": self.about["inner_optimizer"]["plr"]}
        self.lr = rule["lr"] if "lr" in rule else rule["lr0"]
        settings = {k: rule.get(k, 0.0) for k in ("momentum", "weight_decay") if not optimizer}
        self.fleet: Fleet = fleet_of(
            list(groups),
            algorithm,
            data,
            optimizer=partial(optimizer or SGD, lr=self.lr, **settings),
            clip=rule.get("grad_norm_clip"),
            **(work or {"epochs": self.about.get("local_epochs", 1)}),
        )
        self.fleet.plan = RoundPlan(lr=self.lr)
        model: Any = algorithm.get_submodule("model")
        self._start(model.floats, model.layout)

    def _start(self, server: Tensor, layout: ModelLayout) -> None:
        """The server, and clients that keep all of its model, begin with the recorded values."""
        if layout != self.fleet.groups[0].layout:
            return
        server.copy_(self.row("init"))
        if self.fleet.algorithm.stateful or self.fleet.personal:
            for client in range(self.fleet.clients):
                if self.fleet.state(client).layout == layout:
                    self.fleet.row(client).floats.copy_(server)

    def rounds(self, patch: pytest.MonkeyPatch, start: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Run the recorded rounds: after each, its number and its participants.

        Args:
            patch: names the participants.
            start: number of the first round in the run.
        """
        for t, recorded in enumerate(self.about["rounds"]):
            everyone = range(len(self.about["batches"]))
            active = recorded.get("active", recorded.get("selected", everyone))
            clients = sorted(k + self.spare for k in active)
            first = recorded.get("first_batch", {})
            begins = first.items() if isinstance(first, dict) else enumerate(first)
            self.data.first = {int(k) + self.spare: batch for k, batch in begins}
            patch.setattr(Fleet, "participants", lambda self, t, clients=clients: clients)
            self.fleet.plan = RoundPlan(lr=recorded.get("lr", self.lr))
            run_round(self.fleet, start + t)
            yield t, clients

    def row(self, prefix: str, group: int = 0) -> Tensor:
        """(P,) recorded tensors as a row of a group; 0 for those that are not recorded."""
        layout = self.fleet.groups[group].layout
        row = layout.floats.new_row()
        for name, view in layout.floats.views(row).items():
            layer, _, kind = name.removeprefix("net.").rpartition(".")
            recorded = self.tensors.get(f"{prefix}/{self.names.get(layer, layer)}.{kind}")
            view.copy_(torch.zeros(()) if recorded is None else recorded)
        return row
