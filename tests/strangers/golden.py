"""Recorded federations of the second circle: their data, batches and participants."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.resident import Plan
from lightfed.local.client_group import ClientGroup
from tests.small import GOLDEN, Given, Tensors, fleet_of


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
        return Plan(own, [len(batch) for batch in own.split(8)], None)


class Recorded:
    """A federation that trains as the recorded one.

    Args:
        folder: of the algorithm.
        name: of the run.
        algorithm: to run.
        optimizer: of the run, from the parameters and lr; SGD with the recorded settings if None.
        names: of layers in the recorded tensors, where they differ from those of `Net`.

    Attributes:
        about: the settings.
        tensors: the recorded ones.
        fleet: the clients, with the recorded initial values.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        algorithm: Algorithm,
        *,
        optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.names = names or {}
        place = GOLDEN / folder / name
        self.about = json.loads(place.with_suffix(".json").read_text())
        self.tensors = load_file(place.with_suffix(".safetensors"))
        count = len(self.about["batches"])
        given = [[self.tensors[f"data/{k}/{name}"] for name in "xy"] for k in range(count)]
        parts = [(x, y.long()) for x, y in given]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        ends = torch.tensor([len(labels) for _, labels in parts]).cumsum(0).tolist()
        owned = [range(a, b) for a, b in pairwise([0, *ends])]
        dims = self.about["model"]["dims"]
        dataset = Tensors(x, y, classes=dims[-1], test=(x, y))
        data = InOrder(dataset, Given(*owned), batch_size=8)
        rule = self.about["optimizer"]
        settings = {name: rule[name] for name in ("lr", "momentum", "weight_decay")}
        step: Any = partial(optimizer, lr=rule["lr"]) if optimizer else partial(SGD, **settings)
        clients = [ClientGroup(count, partial(Net, dims))]
        self.fleet: Fleet = fleet_of(
            clients, algorithm, data, optimizer=step, epochs=self.about.get("local_epochs", 1)
        )
        self.fleet.training.lr = rule["lr"]

    def row(self, prefix: str) -> Tensor:
        """(P,) recorded tensors as a row; 0 for those that are not recorded."""
        layout = self.fleet.cohorts[0].layout
        row = layout.floats.new_row()
        for name, view in layout.floats.views(row).items():
            _, layer, kind = name.split(".")
            recorded = self.tensors.get(f"{prefix}/{self.names.get(layer, layer)}.{kind}")
            view.copy_(torch.zeros(()) if recorded is None else recorded)
        return row
