"""A federation for testing an algorithm.

It has uneven clients, dropout, BatchNorm statistics, and a rank without participants. These are
what tends to break the promise that results do not depend on the number of ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Dataset, Samples, Split, Transform
from lightfed.data.partition.schemes import Dirichlet
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


class DrawnImages(Dataset):
    """Images of 8x8 pixels in ten classes: a pattern for each class, and noise on every image.

    They are drawn when they are loaded, and are always the same, so that a conformance run reads no
    file.
    """

    classes = tuple(str(label) for label in range(10))
    input_shape = (1, 8, 8)
    synthetic = True
    sizes: ClassVar[Mapping[Split, int]] = {"train": 300, "test": 100}

    @property
    @override
    def transform(self) -> Transform:
        return Transform(mean=(0.5,), std=(0.25,))

    @override
    def load(self, split: Split) -> Samples:
        patterns = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        labels = torch.arange(self.sizes[split]) % 10
        noise = torch.rand(len(labels), 1, 8, 8, generator=generator)
        images = (patterns[labels] + noise) / 2
        return Samples((255 * images).to(torch.uint8), labels)


def images() -> FederatedDataModule:
    """Return data that clients hold in different classes and sizes."""
    return FederatedDataModule(
        DrawnImages(), Dirichlet(alpha=0.5), batch_size=16, eval_batch_size=30
    )


@dataclass(frozen=True)
class Case:
    """An algorithm and its federation; it can be pickled.

    Attributes:
        algorithm: Makes the algorithm.
        model: Makes a client's network; it accepts `rate` if there are levels.
        levels: The levels of the groups, such as "abd"; empty for one group.
        federation: Arguments of the Federation.
        trainer: Arguments of the FederatedTrainer.
        data: Makes the data module.
        clients: The number of clients in all groups.
    """

    algorithm: Callable[[], Algorithm]
    model: Callable[[], nn.Module] = NormNet
    levels: str = ""
    federation: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], FederatedDataModule] = images
    clients: int = CLIENTS

    def groups(self) -> list[ClientGroup]:
        """Return the groups, which are of equal size; the last one takes the remainder."""
        if not self.levels:
            return [ClientGroup(self.clients, self.model)]

        counts = [self.clients // len(self.levels)] * len(self.levels)
        counts[-1] += self.clients - sum(counts)
        groups = []
        for count, level in zip(counts, self.levels, strict=True):
            groups.append(ClientGroup(count, self.model, level=level))  # type: ignore[arg-type]
        return groups

    def federation_of(self, seed: int = 0) -> Federation:
        """Return the root module of a run with this seed."""
        settings: dict[str, Any] = {
            "optimizer": partial(SGD, lr=0.1, momentum=0.9),
            "fraction": 0.4,
            "evaluate": ("global", "local", "personal", "trained", "aggregated"),
        } | self.federation
        return Federation(self.algorithm(), self.groups(), seed=seed, **settings)
