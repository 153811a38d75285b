"""Schemes that deal samples evenly, by class or by natural owner.

A scheme is a class whose arguments are config keys. It draws only from the generator passed to
`split`. Unless noted, every sample goes to exactly one client, and every client gets some.
"""

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass

import numpy as np
from typing_extensions import override

from lightfed.data.partition.partitioner import (
    KEY,
    Dealer,
    Partitioner,
    Task,
    check_at_least_one,
    check_classes,
    check_concentration,
)
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError, require


class _Shares(Dealer):
    """Deals equal shares, one per client; shares beyond the number of clients are not used."""

    parts: int | None

    @override
    def shares(self, clients: int) -> int:
        return clients if self.parts is None else self.parts

    @override
    def _owners(self, task: Task) -> np.ndarray:
        key, parts = f"{KEY}.parts", self.shares(task.clients)
        found, fix = f"{parts} parts for {task.clients} clients", f"give at least {task.clients}"
        require(parts >= task.clients, key, found, f"{fix}, or leave it out")
        found = f"{parts} parts of {len(task)} samples"
        require(parts <= len(task), key, found, f"give at most {len(task)}")
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

    per_client: int
    """Shards of a client; it rarely sees more classes than this."""
    _: KW_ONLY
    parts: int | None = None
    """Cut shards as if there were this many clients, and leave those of the missing ones unused. By
    default the number of clients."""

    def __post_init__(self) -> None:
        check_at_least_one("per_client", self.per_client)

    @override
    def _share(self, task: Task, shares: int) -> np.ndarray:
        shards = shares * self.per_client
        found = (
            f"{shares} clients x {self.per_client} shards need {shards} samples, "
            f"the training set has {len(task)}"
        )
        require(shards <= len(task), f"{KEY}.per_client", found, "lower it")
        owner = np.empty(len(task), dtype=np.int64)
        shard = np.arange(len(task)) * shards // len(task)
        holder = task.rng.permutation(shards) // self.per_client
        owner[np.concatenate(task.shuffled_classes())] = holder[shard]
        return owner


@dataclass(frozen=True, repr=False)
class Classes(Dealer):
    """Each client holds a fixed number of classes; each class has equally many holders (+-1)."""

    per_client: int
    """Classes of a client."""
    _: KW_ONLY
    alpha: float | None = None
    """Divide a class among its holders by Dirichlet(alpha), as in pFedMoE's pathological split;
    null divides it equally."""
    uniform: tuple[float, float] | None = None
    """Divide a class among its holders in proportion to draws from U(low, high): [0.4, 0.6] in the
    code of other papers by pFedMoE's authors."""
    strict_paper: bool = False
    """HeteroFL's non-iid split exactly: a client that draws a class twice gets only one shard of
    it, hence fewer samples than the others, and the other shard is not used."""

    def __post_init__(self) -> None:
        check_at_least_one("per_client", self.per_client)
        if self.alpha is not None:
            check_concentration("alpha", self.alpha)
        if self.uniform is not None:
            low, high = self.uniform
            fix = "give two shares above 0, the smaller one first, as [0.4, 0.6]"
            require(0 < low <= high < float("inf"), f"{KEY}.uniform", [low, high], fix)
        names = ("strict_paper", "uniform", "alpha")
        chosen = [name for name in names if getattr(self, name) not in (None, False)]
        if chosen[1:]:
            found = f"given with {' and '.join(chosen[1:])}, which also divides a class"
            raise UserError(f"{KEY}.{chosen[0]}", found, "set one of them")

    @override
    def _owners(self, task: Task) -> np.ndarray:
        if self.strict_paper:
            return _heterofl(task, self.per_client)
        pools = [pool for pool in task.shuffled_classes() if len(pool)]
        self._check(task.clients, pools)
        chosen = _least_used(task, self.per_client, len(pools)).ravel()
        holder = np.argsort(chosen, kind="stable") // self.per_client
        ends = np.cumsum(np.bincount(chosen))
        owner = np.empty(len(task), dtype=np.int64)
        for pool, holders in zip(pools, np.split(holder, ends[:-1]), strict=True):
            shares = np.ones(len(holders))
            if self.alpha is not None:
                shares = task.rng.dirichlet(np.full(len(holders), self.alpha))
            elif self.uniform is not None:
                shares = task.rng.uniform(*self.uniform, size=len(holders))
            counts = 1 + largest_remainder(shares, len(pool) - len(holders))
            owner[pool] = np.repeat(task.rng.permutation(holders), counts)
        return owner

    def _check(self, clients: int, pools: list[np.ndarray]) -> None:
        """Refuse settings that leave a class without a holder or a holder without a sample."""
        key, classes, slots = f"{KEY}.per_client", len(pools), clients * self.per_client
        check_classes("per_client", self.per_client, classes)
        found = f"{clients} clients x {self.per_client} cover {slots} of {classes} classes"
        require(slots >= classes, key, found, f"raise it to {-(-classes // clients)}")
        holders, fewest = -(-slots // classes), min(map(len, pools))
        found = (
            f"{clients} clients x {self.per_client} classes need {holders} samples of each of "
            f"{classes} classes, the smallest has {fewest}"
        )
        require(holders <= fewest, key, found, "lower it or use fewer clients")


@dataclass(frozen=True, repr=False)
class Natural(Dealer):
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

    classes: int
    """Classes that a client draws from."""
    samples: int
    """Samples of a client, all different."""

    def __post_init__(self) -> None:
        check_at_least_one("classes", self.classes)
        check_at_least_one("samples", self.samples)

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
        task = Task(labels, clients, num_classes, rng, groups)
        pools = [pool for pool in task.shuffled_classes() if len(pool)]
        check_classes("classes", self.classes, len(pools))
        fewest = sum(sorted(map(len, pools))[: self.classes])
        found = f"{self.samples} samples, but {self.classes} classes may hold as few as {fewest}"
        fix = f"lower it to {fewest}, or raise classes"
        require(fewest >= self.samples, f"{KEY}.samples", found, fix)
        parts = []
        for _ in range(clients):
            drawn = rng.choice(len(pools), self.classes, replace=False)
            union = np.concatenate([pools[label] for label in drawn])
            parts.append(np.sort(rng.choice(union, self.samples, replace=False)))
        return parts


def _least_used(task: Task, per_client: int, classes: int) -> np.ndarray:
    """(clients, per_client) for each client the classes used least so far, ties at random."""
    chosen = np.empty((task.clients, per_client), dtype=np.int64)
    uses = np.zeros(classes, dtype=np.int64)
    for client in range(task.clients):
        chosen[client] = np.lexsort((task.rng.random(classes), uses))[:per_client]
        uses[chosen[client]] += 1
    return chosen


def _heterofl(task: Task, per_client: int) -> np.ndarray:
    """(N,) owners by the rule of HeteroFL's published code (non-iid-n); -1 in an unused shard.

    A class is cut into clients * n / classes shards in the order of the data. The classes of all
    shards are permuted and given to the clients n at a time; a client keeps each class once.
    """
    key, slots = f"{KEY}.per_client", task.clients * per_client
    shards, rest = divmod(slots, task.num_classes)
    found = (
        f"{task.clients} clients x {per_client} shards are {slots}, "
        f"not a multiple of the {task.num_classes} classes"
    )
    fix = "change the number of clients (model.clients), or set strict_paper: false"
    require(rest == 0, key, found, fix)
    fewest = int(task.class_sizes().min())
    found = f"{slots} shards need {shards} samples of each class, the smallest class has {fewest}"
    require(shards <= fewest, key, found, "lower it or use fewer clients")
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
