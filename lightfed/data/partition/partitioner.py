"""The interface of a partition scheme, and what the schemes have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from lightfed.utils.errors import require
from lightfed.utils.recorded import Recorded

KEY = "data.partition.init_args"


class Partitioner(Recorded, ABC):
    """Deals training samples to clients."""

    @abstractmethod
    def split(
        self,
        labels: np.ndarray,
        *,
        clients: int,
        num_classes: int,
        rng: np.random.Generator,
        groups: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Deal samples to clients.

        Args:
            labels: (N,) the class of each sample.
            clients: number of clients.
            num_classes: labels lie in 0 .. num_classes - 1; some classes may not occur.
            rng: the only source of randomness.
            groups: (N,) the natural owner of each sample, if the data set has one.

        Returns:
            The ascending sample indices of each client.

        Raises:
            UserError: this scheme cannot deal these samples to that many clients.
        """

    def shares(self, clients: int) -> int:
        """Number of equal shares that the samples are cut into; some may belong to no client."""
        return clients

    def __repr__(self) -> str:
        """The class and its arguments except defaults, as in `Dirichlet(alpha=0.5)`."""
        own = {k: v for k, v in vars(self).items() if k != "given"}
        given = [(k, v) for k, v in own.items() if getattr(type(self), k, None) != v]
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given)})"


@dataclass(frozen=True)
class Task:
    """The arguments of `Partitioner.split`."""

    labels: np.ndarray
    clients: int
    num_classes: int
    rng: np.random.Generator
    groups: np.ndarray | None

    def __len__(self) -> int:
        return len(self.labels)

    def shuffled_classes(self) -> list[np.ndarray]:
        """The samples of each class in random order; empty for a class that does not occur."""
        order = self.rng.permutation(len(self))
        order = order[np.argsort(self.labels[order], kind="stable")]
        return np.split(order, np.cumsum(self.class_sizes())[:-1])

    def class_sizes(self) -> np.ndarray:
        return np.bincount(self.labels, minlength=self.num_classes)


class Dealer(Partitioner):
    """A scheme that gives each sample to at most one client."""

    @override
    def split(
        self,
        labels: np.ndarray,
        *,
        clients: int,
        num_classes: int,
        rng: np.random.Generator,
        groups: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        found = f"{clients} clients need a sample each, the training set has {len(labels)}"
        fix = "lower the number of clients (model.clients)"
        require(clients <= len(labels), "data.partition", found, fix)
        owner = self._owners(Task(labels, clients, num_classes, rng, groups))
        order = np.argsort(owner, kind="stable")
        # Samples without an owner, -1, come first.
        return np.split(order, np.searchsorted(owner[order], np.arange(clients + 1)))[1:-1]

    @abstractmethod
    def _owners(self, task: Task) -> np.ndarray:
        """(N,) the client that gets each sample, -1 for none."""


def check_concentration(name: str, value: float) -> None:
    fix = "give a number above 0 and at most 1e6 (0.1 is very uneven, 100 nearly even)"
    require(0.0 < value <= 1e6, f"{KEY}.{name}", f"{value} is not a concentration", fix)


def check_at_least_one(name: str, value: int) -> None:
    require(value >= 1, f"{KEY}.{name}", value, "give at least 1")


def check_classes(name: str, wanted: int, present: int) -> None:
    found = f"{wanted} classes of a client, the training set has {present}"
    require(wanted <= present, f"{KEY}.{name}", found, f"give at most {present}")
