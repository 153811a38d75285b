"""Schemes that draw client sizes or class proportions from a Dirichlet distribution."""

import heapq
from dataclasses import KW_ONLY, dataclass

import numpy as np
from typing_extensions import override

from lightfed.data.partition.partitioner import KEY, Dealer, Task, check_concentration
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import require

_ATTEMPTS = 10  # draws until every client has min_size samples; then the last one is repaired


@dataclass(frozen=True, repr=False)
class Quantity(Dealer):
    """Clients differ in size: sizes are drawn from Dirichlet(beta), samples at random."""

    beta: float
    """Concentration: if small, few clients hold nearly everything; if large, sizes are equal."""
    _: KW_ONLY
    min_size: int = 1
    """Samples that every client gets before the rest is divided."""

    def __post_init__(self) -> None:
        check_concentration("beta", self.beta)

    @override
    def _owners(self, task: Task) -> np.ndarray:
        _check_min_size(self.min_size, task)
        shares = task.rng.dirichlet(np.full(task.clients, self.beta))
        rest = len(task) - task.clients * self.min_size
        sizes = self.min_size + largest_remainder(shares, rest)
        return task.rng.permutation(np.repeat(np.arange(task.clients), sizes))


@dataclass(frozen=True, repr=False)
class Dirichlet(Dealer):
    """Each class is divided over the clients by its own draw from Dirichlet(alpha)."""

    alpha: float
    """Concentration: if small, few clients hold a class; if large, it is spread evenly."""
    _: KW_ONLY
    min_size: int = 1
    """Fewest samples of a client. After ten failed draws the largest clients give some away."""
    balance: bool = False
    """Give no more to a client that already has its equal part (FedAPEN, pFedMoE)."""

    def __post_init__(self) -> None:
        check_concentration("alpha", self.alpha)

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
class DirichletClient(Dealer):
    """Clients of equal size (within one), each with class proportions from Dirichlet(alpha).

    DisPFL draws sample by sample, and never ends if all classes of a client are exhausted. Here all
    clients draw what they still need at once. If they ask for more of a class than there is, it is
    divided at random among those who asked. It is then masked, the other proportions are
    renormalised, and clients that need more samples draw again.
    """

    alpha: float
    """Concentration: if small, a client sees few classes; if large, it sees all equally."""

    def __post_init__(self) -> None:
        check_concentration("alpha", self.alpha)

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


def _deal(counts: np.ndarray, task: Task) -> np.ndarray:
    """(N,) owners such that client k gets counts[k, c] random samples of class c."""
    owner = np.empty(len(task), dtype=np.int64)
    for label, pool in enumerate(task.shuffled_classes()):
        owner[pool] = np.repeat(np.arange(task.clients), counts[:, label])
    return owner


def _repair(counts: np.ndarray, least: int) -> None:
    """Give every client `least` samples, taken from the largest class of the largest client."""
    sizes = counts.sum(axis=1)
    donors = [(-size, client) for client, size in enumerate(sizes.tolist())]
    heapq.heapify(donors)
    for poor in np.flatnonzero(sizes < least):
        while sizes[poor] < least:
            donor = donors[0][1]  # never an outdated entry: a receiver stays below every donor
            label = counts[donor].argmax()
            moved = min(least - sizes[poor], sizes[donor] - least, counts[donor, label])
            for client, change in ((donor, -moved), (poor, moved)):
                counts[client, label] += change
                sizes[client] += change
            heapq.heapreplace(donors, (-int(sizes[donor]), donor))


def _renormalised(prior: np.ndarray, left: np.ndarray) -> np.ndarray:
    """(clients, classes) proportions over the classes that have samples left."""
    masked = prior * (left > 0)
    masked[~masked.any(axis=1)] = left  # none of the client's classes is left: take any
    return masked / masked.sum(axis=1, keepdims=True)


def _check_min_size(min_size: int, task: Task) -> None:
    """Refuse a min_size that cannot be met."""
    key, need = f"{KEY}.min_size", task.clients * min_size
    require(min_size >= 1, key, min_size, "give at least 1; no client can train on nothing")
    found = (
        f"{task.clients} clients x min_size {min_size} needs {need} samples, "
        f"the training set has {len(task)}"
    )
    fix = f"lower it to {len(task) // task.clients} or use fewer clients"
    require(need <= len(task), key, found, fix)
