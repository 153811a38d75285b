"""Partition schemes: how training samples are dealt to clients.

A scheme is a class whose arguments are keys of a configuration. It draws only from the generator
that `split` is given. Unless a scheme says otherwise, every sample goes to exactly one client, and
every client gets some.
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from lightfed.data.partition.sorting import stable_order
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError
from lightfed.utils.recorded import Recorded

KEY = "data.partition.init_args"

# Draws until every client has min_size samples. After the last one, samples are moved instead.
_ATTEMPTS = 10


@dataclass(frozen=True)
class Task:
    """The arguments of `Partitioner.split`, with what several schemes need of them."""

    labels: np.ndarray
    clients: int
    num_classes: int
    rng: np.random.Generator
    groups: np.ndarray | None = None
    clients_key: str = "model.clients"
    """The setting that says how many clients there are, for errors."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def shuffled_classes(self) -> list[np.ndarray]:
        """Return the samples of each class in random order; empty for a class without samples."""
        order = self.rng.permutation(len(self))
        order = order[stable_order(self.labels[order])]
        return np.split(order, np.cumsum(self.class_sizes())[:-1])

    def class_sizes(self) -> np.ndarray:
        """Return the number of samples of each class, (classes,)."""
        return np.bincount(self.labels, minlength=self.num_classes)


class Partitioner(Recorded, ABC):
    """Deals training samples to clients.

    Attributes:
        needs_classes: Whether it depends on the classes of samples. Without classes all samples
            have the same one.
    """

    needs_classes: ClassVar[bool] = False

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
            labels: The class of each sample, (N,).
            clients: The number of clients.
            num_classes: Labels lie in 0 .. num_classes - 1. Some classes may not occur.
            rng: The only source of randomness.
            groups: The natural owner of each sample, (N,), if the data set has owners.

        Returns:
            The ascending sample indices of each client.

        Raises:
            UserError: This scheme cannot deal these samples to that many clients.
        """

    def shares(self, clients: int) -> int:
        """Return for how many clients samples are dealt: those of the run, and missing ones.

        A run calls `split` for so many. Its clients get what the first of them have, and the
        samples of the others are not used.

        Args:
            clients: The clients of the run.

        Raises:
            UserError: The scheme deals to fewer clients.
        """
        return clients

    def __repr__(self) -> str:
        """Return the class and its arguments except defaults, as in `Dirichlet(alpha=0.5)`.

        It is a part of a partition's meta data: equal texts mean equal draws.
        """
        # `parts`, which all schemes have, comes behind what is the scheme's own.
        values = {name: value for name, value in vars(self).items() if name != "given"}
        if "parts" in values:
            values["parts"] = values.pop("parts")

        arguments = []
        for name, value in values.items():
            is_default = getattr(type(self), name, None) == value
            if not is_default:
                arguments.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


@dataclass(frozen=True, repr=False)
class _Scheme(Partitioner):
    """A scheme of this module: it deals samples to all clients that `parts` asks for."""

    _: KW_ONLY
    parts: int | None = None
    """Deal as if there were this many clients, and leave the samples of the missing ones unused: of
    20 parts, 4 clients have what the first 4 of 20 clients have, test samples included. By default
    the number of clients."""

    @override
    def shares(self, clients: int) -> int:
        if self.parts is None:
            return clients
        if self.parts < clients:
            raise UserError(
                key=f"{KEY}.parts",
                found=f"{self.parts} parts for {clients} clients",
                fix=f"give {clients} or more",
            )
        return self.parts

    @override
    def split(self, labels: np.ndarray, *, clients: int, **given: Any) -> list[np.ndarray]:
        shares = self.shares(clients)
        clients_key = "model.clients" if self.parts is None else f"{KEY}.parts"
        task = Task(labels, clients=shares, clients_key=clients_key, **given)
        return self._parts(task)[:clients]

    @abstractmethod
    def _parts(self, task: Task) -> list[np.ndarray]:
        """Return the ascending sample indices of each of the task's clients."""


@dataclass(frozen=True, repr=False)
class _Dealer(_Scheme):
    """A scheme that gives each sample to at most one client."""

    @override
    def _parts(self, task: Task) -> list[np.ndarray]:
        if task.clients > len(task):
            raise UserError(
                key="data.partition" if self.parts is None else task.clients_key,
                found=(
                    f"{task.clients} clients need a sample each, the training set has {len(task)}"
                ),
                fix=f"lower the number of clients ({task.clients_key})",
            )

        owner = self._owners(task)
        order = stable_order(owner)
        # Samples without an owner, -1, come before the first bound.
        bounds = np.searchsorted(owner[order], np.arange(task.clients + 1)).tolist()
        return [order[start:end] for start, end in pairwise(bounds)]

    @abstractmethod
    def _owners(self, task: Task) -> np.ndarray:
        """Return the client that gets each sample, (N,); -1 for none."""


@dataclass(frozen=True, repr=False)
class Iid(_Dealer):
    """Every client gets the same number of samples (within one), drawn at random."""

    @override
    def _owners(self, task: Task) -> np.ndarray:
        return task.rng.permutation(len(task)) % task.clients


@dataclass(frozen=True, repr=False)
class Shards(_Dealer):
    """The samples, sorted by class, are cut into equal shards; each client gets a few at random."""

    needs_classes = True

    per_client: int
    """Shards of a client; it rarely sees more classes than this."""

    def __post_init__(self) -> None:
        _check_at_least_one("per_client", self.per_client)

    @override
    def _owners(self, task: Task) -> np.ndarray:
        num_shards = task.clients * self.per_client
        if num_shards > len(task):
            raise UserError(
                key=f"{KEY}.per_client",
                found=f"{task.clients} clients x {self.per_client} shards, but {len(task)} samples",
                fix="lower it",
            )

        shard_at = np.arange(len(task)) * num_shards // len(task)
        owner_of_shard = task.rng.permutation(num_shards) // self.per_client

        sorted_by_class = np.concatenate(task.shuffled_classes())
        owner = np.empty(len(task), dtype=np.int64)
        owner[sorted_by_class] = owner_of_shard[shard_at]
        return owner


@dataclass(frozen=True, repr=False)
class Classes(_Dealer):
    """Each client holds a fixed number of classes; each class has equally many holders (+-1)."""

    needs_classes = True

    per_client: int
    """Classes of a client."""
    _: KW_ONLY
    alpha: float | None = None
    """Divide a class among its holders by Dirichlet(alpha), as in pFedMoE's pathological split;
    null divides it equally."""
    strict_paper: bool = False
    """HeteroFL's non-iid split exactly: a client that draws a class twice gets only one shard of
    it, hence fewer samples than the others, and the other shard is not used."""

    def __post_init__(self) -> None:
        _check_at_least_one("per_client", self.per_client)
        if self.alpha is not None:
            _check_concentration("alpha", self.alpha)
            if self.strict_paper:
                raise UserError(
                    key=f"{KEY}.strict_paper",
                    found="given with alpha, which divides too",
                    fix="set one of them",
                )

    @override
    def _owners(self, task: Task) -> np.ndarray:
        if self.strict_paper:
            return _heterofl(task, self.per_client)

        pools = [pool for pool in task.shuffled_classes() if len(pool)]
        self._check_fits(task, pools)
        classes_of_clients, num_holders = self._choose_classes(task, len(pools))

        # The holders of the first class, then those of the second, and so on.
        holders = np.argsort(classes_of_clients.ravel(), kind="stable") // self.per_client
        holders_of_pools = np.split(holders, np.cumsum(num_holders)[:-1])

        owner = np.empty(len(task), dtype=np.int64)
        for pool, pool_holders in zip(pools, holders_of_pools, strict=True):
            shares = np.ones(len(pool_holders))
            if self.alpha is not None:
                shares = task.rng.dirichlet(np.full(len(pool_holders), self.alpha))
            # Every holder gets one sample; the shares divide the rest.
            counts = 1 + largest_remainder(shares, len(pool) - len(pool_holders))
            owner[pool] = np.repeat(task.rng.permutation(pool_holders), counts)
        return owner

    def _check_fits(self, task: Task, pools: list[np.ndarray]) -> None:
        """Refuse a class without a holder, a holder without a sample, and too many classes."""
        num_classes = len(pools)
        fewest = min(len(pool) for pool in pools)
        slots = task.clients * self.per_client
        if not self.per_client <= num_classes <= slots <= num_classes * fewest:
            raise UserError(
                key=f"{KEY}.per_client",
                found=(
                    f"{self.per_client} classes for each of {task.clients} clients, "
                    f"the training set has {num_classes}, the smallest of {fewest} samples"
                ),
                fix="give every class a client, and every client of a class a sample",
            )

    def _choose_classes(self, task: Task, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the classes of each client.

        Returns:
            The classes of each client, (clients, per_client), and the number of clients that hold
            each class, (classes,).
        """
        chosen = np.empty((task.clients, self.per_client), dtype=np.int64)
        uses = np.zeros(num_classes, dtype=np.int64)
        for client in range(task.clients):
            # Those that the fewest clients have so far, and at random among equals.
            by_uses = np.lexsort((task.rng.random(num_classes), uses))
            chosen[client] = by_uses[: self.per_client]
            uses[chosen[client]] += 1
        return chosen, uses


@dataclass(frozen=True, repr=False)
class Natural(_Dealer):
    """Each natural owner (writer, speaker) is a client; owners are grouped if clients are fewer."""

    @override
    def _owners(self, task: Task) -> np.ndarray:
        if task.groups is None:
            raise UserError(
                key="data.partition",
                found="the data set does not name the owners of its samples",
                fix="choose another scheme",
            )

        names, number_of_owner = np.unique(task.groups, return_inverse=True)
        if len(names) < task.clients:
            raise UserError(
                key="data.partition",
                found=(
                    f"{task.clients} clients, but the training set has only {len(names)} owners"
                ),
                fix=f"lower the number of clients ({task.clients_key})",
            )

        client_of_owner = np.arange(len(names))
        if len(names) > task.clients:
            client_of_owner = task.rng.permutation(len(names)) % task.clients
        return client_of_owner[number_of_owner]


@dataclass(frozen=True, repr=False)
class Diversity(_Scheme):
    """Each client draws some classes, then samples of them; clients may share samples (FedBCD)."""

    needs_classes = True

    classes: int
    """Classes that a client draws from."""
    samples: int
    """Samples of a client, all different."""

    def __post_init__(self) -> None:
        _check_at_least_one("classes", self.classes)
        _check_at_least_one("samples", self.samples)

    @override
    def _parts(self, task: Task) -> list[np.ndarray]:
        pools = [pool for pool in task.shuffled_classes() if len(pool)]
        self._check_fits(pools)

        samples_of_clients = []
        for _ in range(task.clients):
            drawn_classes = task.rng.choice(len(pools), self.classes, replace=False)
            union = np.concatenate([pools[label] for label in drawn_classes])
            samples = task.rng.choice(union, self.samples, replace=False)
            samples_of_clients.append(np.sort(samples))
        return samples_of_clients

    def _check_fits(self, pools: list[np.ndarray]) -> None:
        """Refuse more classes than there are, or more samples than any draw of classes has."""
        pool_sizes = sorted(len(pool) for pool in pools)
        fewest = sum(pool_sizes[: self.classes])

        if self.classes > len(pools):
            argument = "classes"
        elif self.samples > fewest:
            argument = "samples"
        else:
            return
        raise UserError(
            key=f"{KEY}.{argument}",
            found=(
                f"{self.classes} of {len(pools)} classes, which may hold as few as {fewest} samples"
            ),
            fix=f"give at most {len(pools)} classes and {fewest} samples",
        )


@dataclass(frozen=True, repr=False)
class Quantity(_Dealer):
    """Clients differ in size: sizes are drawn from Dirichlet(beta), samples at random."""

    beta: float
    """Concentration: if small, few clients hold nearly everything; if large, sizes are equal."""
    _: KW_ONLY
    min_size: int = 1
    """Samples that every client gets before the rest is divided."""

    def __post_init__(self) -> None:
        _check_concentration("beta", self.beta)

    @override
    def _owners(self, task: Task) -> np.ndarray:
        _check_min_size(self.min_size, task)
        shares = task.rng.dirichlet(np.full(task.clients, self.beta))
        rest = len(task) - task.clients * self.min_size
        sizes = self.min_size + largest_remainder(shares, rest)
        return task.rng.permutation(np.repeat(np.arange(task.clients), sizes))


@dataclass(frozen=True, repr=False)
class Dirichlet(_Dealer):
    """Each class is divided over the clients by its own draw from Dirichlet(alpha)."""

    needs_classes = True

    alpha: float
    """Concentration: if small, few clients hold a class; if large, it is spread evenly."""
    _: KW_ONLY
    min_size: int = 1
    """Fewest samples of a client. After ten failed draws the largest clients give some away."""
    balance: bool = False
    """Give no more to a client that already has its equal part (FedAPEN, pFedMoE)."""

    def __post_init__(self) -> None:
        _check_concentration("alpha", self.alpha)

    @override
    def _owners(self, task: Task) -> np.ndarray:
        _check_min_size(self.min_size, task)
        class_sizes = task.class_sizes()

        for _ in range(_ATTEMPTS):
            counts = self._counts(class_sizes, task)
            if counts.sum(axis=1).min() >= self.min_size:
                break
        else:
            _repair(counts, self.min_size)
        return _deal(counts, task)

    def _counts(self, class_sizes: np.ndarray, task: Task) -> np.ndarray:
        """Draw once how many samples of each class a client gets, (clients, classes)."""
        counts = np.zeros((task.clients, task.num_classes), dtype=np.int64)
        for label, size in enumerate(class_sizes.tolist()):
            shares = task.rng.dirichlet(np.full(task.clients, self.alpha))
            if self.balance:
                below = counts.sum(axis=1) * task.clients < class_sizes.sum()
                shares = np.where(below, shares, 0.0)
                if size and not shares.any():
                    # The shares of all clients that may get some have underflowed to 0.
                    shares = below.astype(np.float64)
            if size:
                counts[:, label] = largest_remainder(shares, size)
        return counts


@dataclass(frozen=True, repr=False)
class DirichletClient(_Dealer):
    """Clients of equal size (within one), each with class proportions from Dirichlet(alpha).

    DisPFL draws sample by sample, and never ends if all classes of a client are exhausted. Here all
    clients draw what they still need at once. If they ask for more of a class than there is, it is
    divided at random among those who asked. It is then masked, the other proportions are
    renormalized, and clients that need more samples draw again.
    """

    needs_classes = True

    alpha: float
    """Concentration: if small, a client sees few classes; if large, it sees all equally."""

    def __post_init__(self) -> None:
        _check_concentration("alpha", self.alpha)

    @override
    def _owners(self, task: Task) -> np.ndarray:
        prior = task.rng.dirichlet(np.full(task.num_classes, self.alpha), size=task.clients)
        needed = largest_remainder(np.ones(task.clients), len(task))
        left = task.class_sizes()
        counts = np.zeros((task.clients, task.num_classes), dtype=np.int64)

        # It ends: every pass but the last exhausts a class.
        while needed.any():
            drawn = task.rng.multinomial(needed, _renormalized(prior, left))
            for label in np.flatnonzero(drawn.sum(axis=0) > left):
                drawn[:, label] = task.rng.multivariate_hypergeometric(
                    drawn[:, label], left[label], method="marginals"
                )
            counts += drawn
            needed -= drawn.sum(axis=1)
            left -= drawn.sum(axis=0)
        return _deal(counts, task)


def _heterofl(task: Task, per_client: int) -> np.ndarray:
    """Return the owner of each sample, (N,), by the rule of HeteroFL's published code (non-iid-n).

    Each class is cut into clients * n / classes shards, in the order of the data. The classes of
    all shards are permuted and given to the clients, n to each. A client takes one shard of every
    class that it has drawn, even if it has drawn the class twice. The owner of a shard that nobody
    takes is -1.
    """
    fewest = int(task.class_sizes().min())
    shards, rest = divmod(task.clients * per_client, task.num_classes)
    if rest or shards > fewest:
        raise UserError(
            key=f"{KEY}.per_client",
            found=(
                f"{task.clients} clients x {per_client} shards, but {task.num_classes} classes "
                f"of {fewest} samples or more"
            ),
            fix=(
                f"make the shards a multiple of the classes ({task.clients_key}), "
                "or set strict_paper: false"
            ),
        )

    drawn = task.rng.permutation(np.repeat(np.arange(task.num_classes), shards))
    drawn = drawn.reshape(task.clients, per_client)

    owner = np.full(len(task), -1, dtype=np.int64)
    for label in range(task.num_classes):
        members = np.flatnonzero(task.labels == label)
        position = np.arange(len(members))
        size = len(members) // shards
        # The samples beyond whole shards go one each to the first shards.
        in_whole_shards = position < size * shards
        shard = np.where(in_whole_shards, position // size, position - size * shards)

        takers = np.flatnonzero((drawn == label).any(axis=1))
        taken_shards = task.rng.permutation(shards)[: len(takers)]
        taker_of_shard = np.full(shards, -1, dtype=np.int64)
        taker_of_shard[taken_shards] = takers
        owner[members] = taker_of_shard[shard]
    return owner


def _deal(counts: np.ndarray, task: Task) -> np.ndarray:
    """Return owners, (N,), such that client k gets counts[k, c] random samples of class c."""
    owner = np.empty(len(task), dtype=np.int64)
    for label, pool in enumerate(task.shuffled_classes()):
        owner[pool] = np.repeat(np.arange(task.clients), counts[:, label])
    return owner


def _repair(counts: np.ndarray, least: int) -> None:
    """Give every client `least` samples, taken from the largest class of the largest client.

    Args:
        counts: The samples of each client and class, (clients, classes), changed in place.
        least: At most the mean size of a client.
    """
    sizes = counts.sum(axis=1)
    for poor in np.flatnonzero(sizes < least):
        while sizes[poor] < least:
            donor = sizes.argmax()
            label = counts[donor].argmax()
            wanted = least - sizes[poor]
            spare = sizes[donor] - least
            moved = min(wanted, spare, counts[donor, label])

            counts[donor, label] -= moved
            sizes[donor] -= moved
            counts[poor, label] += moved
            sizes[poor] += moved


def _renormalized(prior: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return the clients' proportions over the classes that have samples left.

    Args:
        prior: Each client's proportions over all classes, (clients, classes).
        left: The samples left of each class, (classes,).
    """
    masked = prior * (left > 0)
    # A client of whose classes none is left takes from any.
    masked[~masked.any(axis=1)] = left
    return masked / masked.sum(axis=1, keepdims=True)


def _check_min_size(min_size: int, task: Task) -> None:
    """Refuse a min_size that cannot be met."""
    most = len(task) // task.clients
    if not 1 <= min_size <= most:
        raise UserError(
            key=f"{KEY}.min_size",
            found=f"{min_size} samples for each of {task.clients} clients, of {len(task)}",
            fix=f"give 1 to {most}, or use fewer clients",
        )


def _check_concentration(name: str, value: float) -> None:
    """Refuse a concentration from which a Dirichlet distribution cannot be drawn well."""
    if not 0.0 < value <= 1e6:
        raise UserError(
            key=f"{KEY}.{name}",
            found=f"{value} is not a concentration",
            fix="give a number above 0 and at most 1e6 (0.1 is very uneven, 100 nearly even)",
        )


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(key=f"{KEY}.{name}", found=f"{value}", fix="give at least 1")
