"""A federation for testing an algorithm.

It has uneven clients, dropout, BatchNorm statistics and a rank without participants. These tend to
break the promise that results do not depend on the number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Samples, Split
from lightfed.data.partition.schemes import Dirichlet
from lightfed.datasets.vision import Digits
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup

CLIENTS = 7
ROUNDS = 3


class NormNet(nn.Module):
    """A small network with BatchNorm statistics and dropout."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, num_classes),
        )  # fmt: skip

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


read_digits = cache(Digits().load)  # by split: reading takes as long as a round


class ReadDigits(Digits):
    """The digits, read once per process: forked ranks have them in memory."""

    @override
    def load(self, split: Split) -> Samples:
        return read_digits(split)


def digits() -> FederatedDataModule:
    """Seven kinds of clients with different classes and sizes."""
    dataset = ReadDigits()
    return FederatedDataModule(dataset, Dirichlet(alpha=0.5), batch_size=64, eval_batch_size=100)


@dataclass(frozen=True)
class Case:
    """An algorithm and its federation; it can be pickled.

    Attributes:
        algorithm: makes the algorithm.
        model: makes a client's network; it accepts `rate` if there are levels.
        levels: of the groups, such as "abd"; empty for one group.
        federation: arguments of the Federation.
        trainer: arguments of the FederatedTrainer.
        data: makes the data module.
        clients: number of clients in all groups.
    """

    algorithm: Callable[[], Algorithm]
    model: Callable[[], nn.Module] = NormNet
    levels: str = ""
    federation: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], FederatedDataModule] = digits
    clients: int = CLIENTS

    def groups(self) -> list[ClientGroup]:
        """The groups, of equal size; the last one takes the remainder."""
        if not self.levels:
            return [ClientGroup(self.clients, self.model)]
        counts = [self.clients // len(self.levels)] * len(self.levels)
        counts[-1] += self.clients - sum(counts)
        return [
            ClientGroup(count, self.model, level=level)  # type: ignore[arg-type]
            for count, level in zip(counts, self.levels, strict=True)
        ]

    def federation_of(self, seed: int = 0) -> Federation:
        """The root module."""
        settings: dict[str, Any] = {
            "optimizer": partial(SGD, lr=0.1, momentum=0.9),
            "fraction": 0.4,
            "evaluate": ("global", "local", "personal", "trained", "aggregated"),
        } | self.federation
        return Federation(self.algorithm(), self.groups(), seed=seed, **settings)
