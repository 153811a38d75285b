"""What a scheme is, and what the schemes of `schemes` and `dirichlet` share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from lightfed.utils.errors import UserError


class Partitioner(ABC):
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
            clients: how many clients there are.
            num_classes: labels lie in 0 .. num_classes - 1; not every class need occur.
            rng: the only source of randomness.
            groups: (N,) the natural owner of each sample, where the data set has one.

        Returns:
            For each client the ascending indices of its samples.

        Raises:
            UserError: these samples cannot be dealt to that many clients in this way.
        """

    def shares(self, clients: int) -> int:
        """How many equal shares the samples are cut into; not all of them need have a client."""
        return clients

    def __repr__(self) -> str:
        """The class and its arguments but defaults, as in `Dirichlet(alpha=0.5)`."""
        given = [(k, v) for k, v in vars(self).items() if getattr(type(self), k, None) != v]
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given)})"


@dataclass(frozen=True)
class Task:
    """What a scheme is given; see `Partitioner.split`."""

    labels: np.ndarray
    clients: int
    num_classes: int
    rng: np.random.Generator
    groups: np.ndarray | None

    def __len__(self) -> int:
        return len(self.labels)

    def shuffled_classes(self) -> list[np.ndarray]:
        """For each class its samples in random order; the classes that do not occur are empty."""
        order = self.rng.permutation(len(self))
        order = order[np.argsort(self.labels[order], kind="stable")]
        return np.split(order, np.cumsum(self.class_sizes())[:-1])

    def class_sizes(self) -> np.ndarray:
        return np.bincount(self.labels, minlength=self.num_classes)


class Dealer(Partitioner):
    """A scheme that gives a sample to one client at most."""

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
        if clients > len(labels):
            raise UserError(
                "data.partition",
                f"{clients} clients need a sample each, the training set has {len(labels)}",
                "lower the number of clients (model.clients)",
            )
        owner = self._owners(Task(labels, clients, num_classes, rng, groups))
        order = np.argsort(owner, kind="stable")
        sizes = np.bincount(owner[owner >= 0], minlength=clients)
        ends = np.cumsum(sizes) + (len(owner) - sizes.sum())  # the samples of nobody come first
        pairs = zip(ends.tolist(), sizes.tolist(), strict=True)
        return [order[end - size : end] for end, size in pairs]

    @abstractmethod
    def _owners(self, task: Task) -> np.ndarray:
        """(N,) the client that gets each sample, -1 for none."""


def check_concentration(name: str, value: float) -> None:
    if not 0.0 < value <= 1e6:
        raise UserError(
            f"data.partition.init_args.{name}",
            f"{value} is not a concentration",
            "give a number above 0 and at most 1e6 (0.1 is very uneven, 100 nearly even)",
        )


def check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"data.partition.init_args.{name}", f"{value}", "give at least 1")


def check_parts(parts: int | None, task: Task) -> None:
    key = "data.partition.init_args.parts"
    if parts is not None and parts < task.clients:
        fix = f"give at least {task.clients}, or leave it out"
        raise UserError(key, f"{parts} parts for {task.clients} clients", fix)
    if parts is not None and parts > len(task):
        raise UserError(key, f"{parts} parts of {len(task)} samples", f"give at most {len(task)}")


def check_classes(name: str, wanted: int, present: int) -> None:
    if wanted > present:
        raise UserError(
            f"data.partition.init_args.{name}",
            f"{wanted} classes of a client, the training set has {present}",
            f"give at most {present}",
        )
