"""Recorded federations of the second circle: their data, batches and participants."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.data.batches import Plan
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from tests.small import GOLDEN, Given, Tensors, fleet_of, run_round

# Numbers of ranks for the promises, which take seconds: one of each kind is in the default tier.
MATRIX = [pytest.param((1, 2, 4), marks=pytest.mark.matrix)]
RANKS = [(1, 2), *MATRIX]


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


class InOrder(FederatedDataModule):
    """A client's batches in the recorded order, which does not change."""

    def train_plan(self, client: int, **_: Any) -> Plan:  # type: ignore[override]
        own = torch.from_numpy(self.partition_.train(client))
        return Plan(own, [len(batch) for batch in own.split(self.size)], None)

    size: int


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

    Attributes:
        about: the settings.
        tensors: the recorded ones.
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
    ) -> None:
        self.names = names or {}
        place = GOLDEN / folder / name
        self.about = json.loads(place.with_suffix(".json").read_text())
        self.tensors = load_file(place.with_suffix(".safetensors"))
        count, model = len(self.about["batches"]), self.about["model"]
        groups = groups or [ClientGroup(count, partial(Net, model["dims"]))]
        self.spare = sum(group.count for group in groups) - count
        given = [[self.tensors[f"data/{k}/{name}"] for name in "xy"] for k in range(count)]
        parts = [(x, y.long()) for x, y in given[:1] * self.spare + given]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        ends = torch.tensor([len(labels) for _, labels in parts]).cumsum(0).tolist()
        owned = [range(a, b) for a, b in pairwise([0, *ends])]
        classes = model["classes"] if "classes" in model else model["dims"][-1]
        data = InOrder(Tensors(x, y, classes=classes, test=(x, y)), Given(*owned), batch_size=8)
        data.size = self.about["batch_size"]
        rule = self.about["optimizer"]
        self.lr = rule["lr"] if "lr" in rule else rule["lr0"]
        settings = {key: rule[key] for key in ("momentum", "weight_decay") if not optimizer}
        self.fleet: Fleet = fleet_of(
            list(groups),
            algorithm,
            data,
            optimizer=partial(optimizer or SGD, lr=self.lr, **settings),
            clip=rule.get("grad_norm_clip"),
            epochs=self.about.get("local_epochs", 1),
        )
        self.fleet.plan = RoundPlan(lr=self.lr)

    def rounds(self, patch: pytest.MonkeyPatch, first: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Run the recorded rounds: after each, its number and its participants.

        Args:
            patch: names the participants.
            first: number of the first round in the run.
        """
        for t, recorded in enumerate(self.about["rounds"]):
            clients = sorted(k + self.spare for k in recorded["active"])
            patch.setattr(Fleet, "participants", lambda self, t, clients=clients: clients)
            self.fleet.plan = RoundPlan(lr=recorded.get("lr", self.lr))
            run_round(self.fleet, first + t)
            yield t, clients

    def row(self, prefix: str) -> Tensor:
        """(P,) recorded tensors as a row of the first group; 0 for those that are not recorded."""
        layout = self.fleet.groups[0].layout
        row = layout.floats.new_row()
        for name, view in layout.floats.views(row).items():
            layer, _, kind = name.removeprefix("net.").rpartition(".")
            recorded = self.tensors.get(f"{prefix}/{self.names.get(layer, layer)}.{kind}")
            view.copy_(torch.zeros(()) if recorded is None else recorded)
        return row
