"""Six devices with random samples, and models for them: what tests of the clouds share."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from tests.small import Line, fleet_of, random_data

SIZES = [10, 6, 12, 7, 8, 11]  # no batch of 4 is a single sample
mlp = partial(MLP, hidden=(8,), dropout=0.2)


class Normed(nn.Module):
    """Every sample passes a BatchNorm, whose momentum is 1: it holds its last batch's figures."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, num_classes)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def fleet(algorithm: Algorithm, *, model: Any = mlp, sizes: Any = SIZES, **settings: Any) -> Fleet:
    optimizer = partial(ASPG, lr=0.05, momentum=0.8)
    return fleet_of(
        [ClientGroup(len(sizes), model)], algorithm, random_data(sizes, batch_size=4),
        **({"optimizer": optimizer} | settings),
    )  # fmt: skip


def spread(fed: Fleet) -> None:
    """Device i has i everywhere."""
    live = fed.groups[0].layout.floats.live()
    for device in range(fed.clients):
        fed.row(device).floats.copy_(device * live)


def rows(fed: Fleet) -> Tensor:
    return torch.stack([fed.row(k).floats for k in range(fed.clients)])


def servers(fed: Fleet) -> Tensor:
    assert isinstance(fed.algorithm, FedBCD)
    count = fed.algorithm.hierarchy.servers
    return torch.stack([fed.algorithm.clouds.of(n).floats for n in range(count)])


class Counted(Line):
    """Counts the steps of all sessions."""

    steps = 0

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Counted.steps += 1
        return super().training_step(batch, batch_idx)
