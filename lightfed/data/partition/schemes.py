"""Partition schemes: how training samples are dealt to clients.

A scheme is a class whose arguments are config keys. It draws only from the generator passed to
`split`. Unless noted, every sample goes to exactly one client, and every client gets some.
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError, require
from lightfed.utils.recorded import Recorded

KEY = "data.partition.init_args"
_ATTEMPTS = 10  # draws until every client has min_size samples; then the last one is repaired


@dataclass(frozen=True)
class Task:
    """The arguments of `Partitioner.split`."""

    labels: np.ndarray
    clients: int
    num_classes: int
    rng: np.random.Generator
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def shuffled_classes(self) -> list[np.ndarray]:
        """The samples of each class in random order; empty for a class that does not occur."""
        order = self.rng.permutation(len(self))
        order = order[np.argsort(self.labels[order], kind="stable")]
        return np.split(order, np.cumsum(self.class_sizes())[:-1])

    def class_sizes(self) -> np.ndarray:
        return np.bincount(self.labels, minlength=self.num_classes)


class Partitioner(Recorded, ABC):
    """Deals training samples to clients.

    Attributes:
        needs_classes: whether it depends on the classes of samples; without classes all have one.
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


class _Dealer(Partitioner):
    """A scheme that gives each sample to at most one client."""

    @override
    def split(self, labels: np.ndarray, **given: Any) -> list[np.ndarray]:
        task = Task(labels, **given)
        found = f"{task.clients} clients need a sample each, the training set has {len(task)}"
        fix = "lower the number of clients (model.clients)"
        require(task.clients <= len(task), "data.partition", found, fix)
        owner = self._owners(task)
        order = np.argsort(owner, kind="stable")
        # Samples without an owner, -1, come first.
        return np.split(order, np.searchsorted(owner[order], np.arange(task.clients + 1)))[1:-1]

    @abstractmethod
    def _owners(self, task: Task) -> np.ndarray:
        """(N,) the client that gets each sample, -1 for none."""


class _Shares(_Dealer):
    """Deals equal shares, one per client; shares beyond the number of clients are not used."""

    parts: int | None

    @override
    def shares(self, clients: int) -> int:
        return clients if self.parts is None else self.parts

    @override
    def _owners(self, task: Task) -> np.ndarray:
        parts, samples = self.shares(task.clients), len(task)
        found = f"{parts} parts for {task.clients} clients and {samples} samples"
        fits, fix = task.clients <= parts <= samples, f"give {task.clients} to {samples}"
        require(fits, f"{KEY}.parts", found, fix)
        share = self._share(task, parts)
        return np.where(share < task.clients, share, -1)

    @abstractmethod
    def _share(self, task: Task, shares: int) -> np.ndarray:
        """(N,) the share of each sample."""


@dataclass(frozen=True, repr=False)
class Iid(_Shares):
    """Every client gets the same number of samples (within one), drawn at random."""

    _: KW_ONLY
    parts: int | None = None
    """Deal as if there were this many clients, and leave the samples of the missing ones unused:
    with 20, each client gets a twentieth of the samples. By default the number of clients."""

    @override
    def _share(self, task: Task, shares: int) -> np.ndarray:
        return task.rng.permutation(len(task)) % shares


@dataclass(frozen=True, repr=False)
class Shards(_Shares):
    """The samples, sorted by class, are cut into equal shards; each client gets a few at random."""

    needs_classes = True

    per_client: int
    """Shards of a client; it rarely sees more classes than this."""
    _: KW_ONLY
    parts: int | None = None
    """Cut shards as if there were this many clients, and leave those of the missing ones unused. By
    default the number of clients."""

    def __post_init__(self) -> None:
        _check_at_least_one("per_client", self.per_client)

    @override
    def _share(self, task: Task, shares: int) -> np.ndarray:
        shards = shares * self.per_client
        found = f"{shares} clients x {self.per_client} shards, but {len(task)} samples"
        require(shards <= len(task), f"{KEY}.per_client", found, "lower it")
        owner = np.empty(len(task), dtype=np.int64)
        shard = np.arange(len(task)) * shards // len(task)
        holder = task.rng.permutation(shards) // self.per_client
        owner[np.concatenate(task.shuffled_classes())] = holder[shard]
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
        fits, found = not (self.strict_paper and self.alpha), "given with alpha, which divides too"
        require(fits, f"{KEY}.strict_paper", found, "set one of them")

    @override
    def _owners(self, task: Task) -> np.ndarray:
        if self.strict_paper:
            return _heterofl(task, self.per_client)
        pools = [pool for pool in task.shuffled_classes() if len(pool)]
        classes, fewest, slots = len(pools), min(map(len, pools)), task.clients * self.per_client
        found = (
            f"{self.per_client} classes for each of {task.clients} clients, "
            f"the training set has {classes}, the smallest of {fewest} samples"
        )
        fits = self.per_client <= classes <= slots <= classes * fewest
        fix = "give every class a client, and every client of a class a sample"
        require(fits, f"{KEY}.per_client", found, fix)
        chosen = np.empty((task.clients, self.per_client), dtype=np.int64)
        uses = np.zeros(len(pools), dtype=np.int64)
        for own in chosen:  # the classes used least so far, ties at random
            own[:] = np.lexsort((task.rng.random(len(pools)), uses))[: self.per_client]
            uses[own] += 1
        holder = np.argsort(chosen.ravel(), kind="stable") // self.per_client
        ends = np.cumsum(uses)
        owner = np.empty(len(task), dtype=np.int64)
        for pool, holders in zip(pools, np.split(holder, ends[:-1]), strict=True):
            shares = np.ones(len(holders))
            if self.alpha is not None:
                shares = task.rng.dirichlet(np.full(len(holders), self.alpha))
            counts = 1 + largest_remainder(shares, len(pool) - len(holders))
            owner[pool] = np.repeat(task.rng.permutation(holders), counts)
        return owner


@dataclass(frozen=True, repr=False)
class Natural(_Dealer):
    """Each natural owner (writer, speaker) is a client; owners are grouped if clients are fewer."""

    @override
    def _owners(self, task: Task) -> np.ndarray:
        key, fix = "data.partition", "lower the number of clients (model.clients)"
        if task.groups is None:
            raise UserError(key, "the data set has no natural owners", "choose another scheme")
        names, group = np.unique(task.groups, return_inverse=True)
        found = f"{task.clients} clients, but the training set has {len(names)} natural owners"
        require(len(names) >= task.clients, key, found, fix)
        holder = np.arange(len(names))
        if len(names) > task.clients:
            holder = task.rng.permutation(len(names)) % task.clients
        return holder[group]


@dataclass(frozen=True, repr=False)
class Diversity(Partitioner):
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
    def split(self, labels: np.ndarray, **given: Any) -> list[np.ndarray]:
        task = Task(labels, **given)
        pools = [pool for pool in task.shuffled_classes() if len(pool)]
        fewest = sum(sorted(map(len, pools))[: self.classes])
        found = f"{self.classes} of {len(pools)} classes, which may hold as few as {fewest} samples"
        fits = self.classes <= len(pools) and self.samples <= fewest
        key = "samples" if self.classes <= len(pools) else "classes"
        fix = f"give at most {len(pools)} classes and {fewest} samples"
        require(fits, f"{KEY}.{key}", found, fix)
        parts = []
        for _ in range(task.clients):
            drawn = task.rng.choice(len(pools), self.classes, replace=False)
            union = np.concatenate([pools[label] for label in drawn])
            parts.append(np.sort(task.rng.choice(union, self.samples, replace=False)))
        return parts


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
        sizes = task.class_sizes()
        for _ in range(_ATTEMPTS):
            counts = self._counts(sizes, task)
            if counts.sum(axis=1).min() >= self.min_size:
                break
        else:
            _repair(counts, self.min_size)
        return _deal(counts, task)

    def _counts(self, class_sizes: np.ndarray, task: Task) -> np.ndarray:
        """(clients, classes) one draw of the number of samples per client and class."""
        counts = np.zeros((task.clients, task.num_classes), dtype=np.int64)
        for label, size in enumerate(class_sizes.tolist()):
            shares = task.rng.dirichlet(np.full(task.clients, self.alpha))
            if self.balance:
                below = counts.sum(axis=1) * task.clients < class_sizes.sum()
                shares = np.where(below, shares, 0.0)
                if size and not shares.any():  # the shares of all these clients underflowed to 0
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
    renormalised, and clients that need more samples draw again.
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
        while needed.any():  # at most once per exhausted class, and once more
            drawn = task.rng.multinomial(needed, _renormalised(prior, left))
            for label in np.flatnonzero(drawn.sum(axis=0) > left):
                drawn[:, label] = task.rng.multivariate_hypergeometric(
                    drawn[:, label], left[label], method="marginals"
                )
            counts += drawn
            needed -= drawn.sum(axis=1)
            left -= drawn.sum(axis=0)
        return _deal(counts, task)


def _heterofl(task: Task, per_client: int) -> np.ndarray:
    """(N,) owners by the rule of HeteroFL's published code (non-iid-n); -1 in an unused shard.

    A class is cut into clients * n / classes shards in the order of the data. The classes of all
    shards are permuted and given to the clients n at a time; a client keeps each class once.
    """
    slots, fewest = task.clients * per_client, int(task.class_sizes().min())
    shards, rest = divmod(slots, task.num_classes)
    found = (
        f"{task.clients} clients x {per_client} shards, but {task.num_classes} classes "
        f"of {fewest} samples or more"
    )
    fix = "make the shards a multiple of the classes (model.clients), or set strict_paper: false"
    require(rest == 0 and shards <= fewest, f"{KEY}.per_client", found, fix)
    drawn = task.rng.permutation(np.repeat(np.arange(task.num_classes), shards))
    drawn = drawn.reshape(task.clients, per_client)
    owner = np.full(len(task), -1, dtype=np.int64)
    for label in range(task.num_classes):
        members = np.flatnonzero(task.labels == label)
        size = len(members) // shards
        position = np.arange(len(members))
        # The first shards get one of the samples left over each.
        shard = np.where(position < size * shards, position // size, position - size * shards)
        takers = np.flatnonzero((drawn == label).any(axis=1))
        holder = np.full(shards, -1, dtype=np.int64)
        holder[task.rng.permutation(shards)[: len(takers)]] = takers
        owner[members] = holder[shard]
    return owner


def _deal(counts: np.ndarray, task: Task) -> np.ndarray:
    """(N,) owners such that client k gets counts[k, c] random samples of class c."""
    owner = np.empty(len(task), dtype=np.int64)
    for label, pool in enumerate(task.shuffled_classes()):
        owner[pool] = np.repeat(np.arange(task.clients), counts[:, label])
    return owner


def _repair(counts: np.ndarray, least: int) -> None:
    """Give every client `least` samples, taken from the largest class of the largest client."""
    sizes = counts.sum(axis=1)
    for poor in np.flatnonzero(sizes < least):
        while sizes[poor] < least:
            donor = sizes.argmax()
            label = counts[donor].argmax()
            moved = min(least - sizes[poor], sizes[donor] - least, counts[donor, label])
            for client, change in ((donor, -moved), (poor, moved)):
                counts[client, label] += change
                sizes[client] += change


def _renormalised(prior: np.ndarray, left: np.ndarray) -> np.ndarray:
    """(clients, classes) proportions over the classes that have samples left."""
    masked = prior * (left > 0)
    masked[~masked.any(axis=1)] = left  # none of the client's classes is left: take any
    return masked / masked.sum(axis=1, keepdims=True)


def _check_min_size(min_size: int, task: Task) -> None:
    """Refuse a min_size that cannot be met."""
    most = len(task) // task.clients
    found = f"{min_size} samples for each of {task.clients} clients, of {len(task)}"
    fix = f"give 1 to {most}, or use fewer clients"
    require(1 <= min_size <= most, f"{KEY}.min_size", found, fix)


def _check_concentration(name: str, value: float) -> None:
    fix = "give a number above 0 and at most 1e6 (0.1 is very uneven, 100 nearly even)"
    require(0.0 < value <= 1e6, f"{KEY}.{name}", f"{value} is not a concentration", fix)


def _check_at_least_one(name: str, value: int) -> None:
    require(value >= 1, f"{KEY}.{name}", value, "give at least 1")
