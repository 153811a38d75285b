"""Splits that deal samples evenly, by class or by natural owner.

A scheme is a class whose arguments are config keys; it draws from the one generator that `split` is
given. Except where it says otherwise every sample goes to one client, and no client stays empty.
"""

from dataclasses import KW_ONLY, dataclass

import numpy as np
from typing_extensions import override

from lightfed.data.partition.partitioner import (
    Dealer,
    Partitioner,
    Task,
    check_at_least_one,
    check_classes,
    check_concentration,
    check_parts,
)
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError


@dataclass(frozen=True, repr=False)
class Iid(Dealer):
    """Every client gets the same number of samples (within one), drawn at random."""

    _: KW_ONLY
    parts: int | None = None
    """Deal as if for so many clients, and leave to nobody what would be for those that are not
    there: with 20, a client gets a twentieth of the samples. As many as there are clients by
    default."""

    @override
    def shares(self, clients: int) -> int:
        return self.parts or clients

    @override
    def _owners(self, task: Task) -> np.ndarray:
        check_parts(self.parts, task)
        shares = self.shares(task.clients)
        return _present(task.rng.permutation(len(task)) % shares, task.clients)


@dataclass(frozen=True, repr=False)
class Shards(Dealer):
    """The samples, sorted by class, are cut into equal shards; a client gets some at random."""

    per_client: int
    """Shards of a client: the most classes that it usually sees."""
    _: KW_ONLY
    parts: int | None = None
    """Cut shards for so many clients, and leave to nobody those of clients that are not there. As
    many as there are clients by default."""

    def __post_init__(self) -> None:
        check_at_least_one("per_client", self.per_client)

    @override
    def shares(self, clients: int) -> int:
        return self.parts or clients

    @override
    def _owners(self, task: Task) -> np.ndarray:
        check_parts(self.parts, task)
        shares = self.shares(task.clients)
        shards = shares * self.per_client
        if shards > len(task):
            raise UserError(
                "data.partition.init_args.per_client",
                f"{shares} clients x {self.per_client} shards need {shards} samples, "
                f"the training set has {len(task)}",
                "lower it",
            )
        owner = np.empty(len(task), dtype=np.int64)
        shard = np.arange(len(task)) * shards // len(task)
        holder = task.rng.permutation(shards) // self.per_client
        owner[np.concatenate(task.shuffled_classes())] = holder[shard]
        return _present(owner, task.clients)


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
    code of other papers of pFedMoE's authors."""
    strict_paper: bool = False
    """HeteroFL's non-iid split to the letter: a client that draws one class twice gets a single
    shard of it, hence fewer samples than the others, and the other shard is nobody's."""

    def __post_init__(self) -> None:
        check_at_least_one("per_client", self.per_client)
        if self.alpha is not None:
            check_concentration("alpha", self.alpha)
        if self.uniform is not None and not 0 < self.uniform[0] <= self.uniform[1] < float("inf"):
            raise UserError(
                "data.partition.init_args.uniform",
                f"{list(self.uniform)}",
                "give two shares above 0, the smaller one first, as [0.4, 0.6]",
            )
        names = ("strict_paper", "uniform", "alpha")
        chosen = [name for name in names if getattr(self, name) not in (None, False)]
        if len(chosen) > 1:
            raise UserError(
                f"data.partition.init_args.{chosen[0]}",
                f"{' and '.join(chosen[1:])} beside it, which also divides a class",
                "set one of them",
            )

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
        """Refuse what would leave a class without a holder or a holder without a sample."""
        key = "data.partition.init_args.per_client"
        check_classes("per_client", self.per_client, len(pools))
        slots = clients * self.per_client
        if slots < len(pools):
            raise UserError(
                key,
                f"{clients} clients x {self.per_client} cover {slots} of {len(pools)} classes",
                f"raise it to {-(-len(pools) // clients)}",
            )
        holders = -(-slots // len(pools))
        fewest = min(len(pool) for pool in pools)
        if holders > fewest:
            raise UserError(
                key,
                f"{clients} clients x {self.per_client} classes need {holders} samples of each of "
                f"{len(pools)} classes, the smallest has {fewest}",
                "lower it or use fewer clients",
            )


@dataclass(frozen=True, repr=False)
class Natural(Dealer):
    """Each natural owner (writer, speaker) is a client; owners are grouped if clients are fewer."""

    @override
    def _owners(self, task: Task) -> np.ndarray:
        if task.groups is None:
            raise UserError(
                "data.partition", "the data set has no natural owners", "choose another scheme"
            )
        names, group = np.unique(task.groups, return_inverse=True)
        if len(names) < task.clients:
            raise UserError(
                "data.partition",
                f"{task.clients} clients, but the training set has {len(names)} natural owners",
                "lower the number of clients (model.clients)",
            )
        holder = np.arange(len(names))
        if len(names) > task.clients:
            holder = task.rng.permutation(len(names)) % task.clients
        return holder[group]


@dataclass(frozen=True, repr=False)
class Diversity(Partitioner):
    """Each client draws some classes, then samples of these; clients may share them (FedBCD)."""

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
        fewest = int(np.sort([len(pool) for pool in pools])[: self.classes].sum())
        if fewest < self.samples:
            raise UserError(
                "data.partition.init_args.samples",
                f"{self.samples} samples, but {self.classes} classes may hold as few as {fewest}",
                f"lower it to {fewest}, or raise classes",
            )
        parts = []
        for _ in range(clients):
            drawn = rng.choice(len(pools), self.classes, replace=False)
            union = np.concatenate([pools[label] for label in drawn])
            parts.append(np.sort(rng.choice(union, self.samples, replace=False)))
        return parts


def _present(owner: np.ndarray, clients: int) -> np.ndarray:
    """(N,) owners, -1 instead of clients that are not there."""
    return np.where(owner < clients, owner, -1)


def _least_used(task: Task, per_client: int, classes: int) -> np.ndarray:
    """(clients, per_client) classes, for each client the least used so far, ties at random."""
    chosen = np.empty((task.clients, per_client), dtype=np.int64)
    uses = np.zeros(classes, dtype=np.int64)
    for client in range(task.clients):
        chosen[client] = np.lexsort((task.rng.random(classes), uses))[:per_client]
        uses[chosen[client]] += 1
    return chosen


def _heterofl(task: Task, per_client: int) -> np.ndarray:
    """(N,) owners by the rule of HeteroFL's published code (non-iid-n); -1 in a shard of nobody.

    A class is cut into clients * n / classes shards in the order of the data. The classes of all
    shards are permuted and given to the clients n at a time; a client keeps each class once.
    """
    key = "data.partition.init_args.per_client"
    slots = task.clients * per_client
    if slots % task.num_classes:
        raise UserError(
            key,
            f"{task.clients} clients x {per_client} shards are {slots}, "
            f"not a multiple of the {task.num_classes} classes",
            "change the number of clients (model.clients), or set strict_paper: false",
        )
    shards = slots // task.num_classes
    fewest = int(task.class_sizes().min())
    if fewest < shards:
        raise UserError(
            key,
            f"{slots} shards need {shards} samples of each class, the smallest class has {fewest}",
            "lower it or use fewer clients",
        )
    drawn = task.rng.permutation(np.repeat(np.arange(task.num_classes), shards))
    drawn = drawn.reshape(task.clients, per_client)
    owner = np.full(len(task), -1, dtype=np.int64)
    for label in range(task.num_classes):
        members = np.flatnonzero(task.labels == label)
        size = len(members) // shards
        position = np.arange(len(members))
        # what is left over goes one by one to the first shards
        shard = np.where(position < size * shards, position // size, position - size * shards)
        takers = np.flatnonzero((drawn == label).any(axis=1))
        holder = np.full(shards, -1, dtype=np.int64)
        holder[task.rng.permutation(shards)[: len(takers)]] = takers
        owner[members] = holder[shard]
    return owner
