"""Trains a federation of its own parts while every ring is refused by the import system.

`tests/test_rooms.py` runs it in a process of its own, where no module of lightfed has been imported
yet.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

RINGS = ("algorithms", "networks", "datasets", "packs", "devices", "lab", "federation", "trainer")


class RefuseRings(MetaPathFinder):
    """Refuses to import any ring of lightfed."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = fullname.split(".")
        if parts[0] == "lightfed" and parts[1:2] and parts[1] in RINGS:
            raise ImportError(f"{fullname} is a ring")
        return None


sys.meta_path.insert(0, RefuseRings())

# The process that this one is forked from has registered it, and a second time is an error.
StrategyRegistry.pop("federated", None)

import lightfed.engine.loop  # noqa: E402, F401 - the core as far as its loop
from lightfed.api.algorithm import Algorithm  # noqa: E402
from lightfed.api.fleet import Fleet  # noqa: E402
from lightfed.data.datamodule import FederatedDataModule  # noqa: E402
from lightfed.data.dataset import Dataset, Samples, Split, Transform  # noqa: E402
from lightfed.data.partition.schemes import Iid  # noqa: E402
from lightfed.distributed.collectives import Ranks  # noqa: E402
from lightfed.engine.session_setup import client_stepper  # noqa: E402
from lightfed.local.client_group import ClientGroup  # noqa: E402
from lightfed.local.session import Runtime  # noqa: E402

CPU = torch.device("cpu")
CLIENTS = 4


class Halves(Dataset):
    """Points of two classes: the first coordinate is negative or positive."""

    classes = ("left", "right")
    input_shape = (2,)

    @property
    @override
    def transform(self) -> Transform | None:
        return None

    @override
    def load(self, split: Split) -> Samples:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        x = torch.randn(64, 2, generator=generator)
        return Samples(x, (x[:, 0] > 0).long())


class Plane(nn.Module):
    """A linear classifier."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(2, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Mean(Algorithm):
    """FedAvg: the server's model becomes the mean of the clients' models."""

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_model()

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)
        fed.train(clients, t)
        fed.merge(clients, into=self.model)

    @override
    def models(self, fed: Fleet, kind: Any, clients: Sequence[int]) -> Any:
        return fed.server_rows(self.model, clients)


def main() -> None:
    data = FederatedDataModule(Halves(), Iid(), batch_size=8)
    data.prepare(clients=CLIENTS, seed=0, device=CPU)
    algorithm = Mean()
    fleet = Fleet([ClientGroup(CLIENTS, Plane)], algorithm, data, ranks=Ranks(CPU))
    runtime = Runtime()
    fleet.training.attach(
        runtime,
        [client_stepper(state, i, lambda p: SGD(p, lr=0.5), runtime, {})
         for i, state in enumerate(fleet.groups)],
    )  # fmt: skip

    losses = []
    for t in range(2):
        fleet.open_round()
        algorithm.round(fleet, t)
        losses.append(fleet.close_round()["train_loss"])
    assert losses[1] < losses[0], losses

    imported = {name.split(".")[1] for name in sys.modules if name.startswith("lightfed.")}
    assert not imported & set(RINGS), imported & set(RINGS)
    print("the core trains alone")


if __name__ == "__main__":
    main()
