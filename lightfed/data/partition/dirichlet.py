"""Splits whose sizes or class proportions are drawn from a Dirichlet distribution."""

import heapq
from dataclasses import KW_ONLY, dataclass

import numpy as np
from typing_extensions import override

from lightfed.data.partition.partitioner import Dealer, Task, check_concentration
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError

_ATTEMPTS = 10  # draws until every client has min_size samples; then the last one is repaired


@dataclass(frozen=True, repr=False)
class Quantity(Dealer):
    """Clients differ in how much they hold: sizes are Dirichlet(beta), samples are random."""

    beta: float
    """Concentration: small means few clients hold nearly everything, large means equal sizes."""
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
    """Concentration: small means a class lies with few clients, large means an even spread."""
    _: KW_ONLY
    min_size: int = 1
    """Fewest samples of a client: ten draws are tried, then the largest clients give some away."""
    balance: bool = False
    """Give nothing more to a client that has its equal part already (FedAPEN, pFedMoE)."""

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
        """(clients, classes) one draw of how many samples of each class each client gets."""
        counts = np.zeros((task.clients, task.num_classes), dtype=np.int64)
        held = np.zeros(task.clients, dtype=np.int64)
        for label, size in enumerate(class_sizes.tolist()):
            shares = task.rng.dirichlet(np.full(task.clients, self.alpha))
            if self.balance:
                open_clients = held * task.clients < class_sizes.sum()
                shares = np.where(open_clients, shares, 0.0)
                if size and not shares.any():  # all that is open has underflowed to 0
                    shares = open_clients.astype(np.float64)
            if size:
                counts[:, label] = largest_remainder(shares, size)
                held += counts[:, label]
        return counts


@dataclass(frozen=True, repr=False)
class DirichletClient(Dealer):
    """Clients of equal size (within one), each with class proportions drawn from Dirichlet(alpha).

    DisPFL draws sample by sample, and never ends when a client's classes are exhausted. Here all
    clients draw what they lack at once. A class that is asked for more than it has is shared out
    at random among those who asked; then it is masked, the proportions of the others are
    renormalised, and who still lacks samples draws again.
    """

    alpha: float
    """Concentration: small means a client sees few classes, large means that it sees all alike."""

    def __post_init__(self) -> None:
        check_concentration("alpha", self.alpha)

    @override
    def _owners(self, task: Task) -> np.ndarray:
        prior = task.rng.dirichlet(np.full(task.num_classes, self.alpha), size=task.clients)
        lack = largest_remainder(np.ones(task.clients), len(task))
        left = task.class_sizes()
        counts = np.zeros((task.clients, task.num_classes), dtype=np.int64)
        while lack.any():  # once per exhausted class at most, and once more
            drawn = task.rng.multinomial(lack, _renormalised(prior, left))
            for label in np.flatnonzero(drawn.sum(axis=0) > left):
                drawn[:, label] = task.rng.multivariate_hypergeometric(
                    drawn[:, label], left[label], method="marginals"
                )
            counts += drawn
            lack -= drawn.sum(axis=1)
            left -= drawn.sum(axis=0)
        return _deal(counts, task)


def _deal(counts: np.ndarray, task: Task) -> np.ndarray:
    """(N,) owners such that client k gets counts[k, c] random samples of class c."""
    owner = np.empty(len(task), dtype=np.int64)
    clients = np.arange(task.clients)
    for label, pool in enumerate(task.shuffled_classes()):
        owner[pool] = np.repeat(clients, counts[:, label])
    return owner


def _repair(counts: np.ndarray, least: int) -> None:
    """Give every client `least` samples, taken from the largest class of the largest client."""
    sizes = counts.sum(axis=1)
    donors = [(-size, client) for client, size in enumerate(sizes.tolist())]
    heapq.heapify(donors)
    for poor in np.flatnonzero(sizes < least):
        while sizes[poor] < least:
            donor = donors[0][1]  # its entry is current: who receives stays below every donor
            label = counts[donor].argmax()
            moved = min(least - sizes[poor], sizes[donor] - least, counts[donor, label])
            counts[donor, label] -= moved
            counts[poor, label] += moved
            sizes[donor] -= moved
            sizes[poor] += moved
            heapq.heapreplace(donors, (-int(sizes[donor]), donor))


def _renormalised(prior: np.ndarray, left: np.ndarray) -> np.ndarray:
    """(clients, classes) proportions over the classes that have samples left."""
    masked = prior * (left > 0)
    lost = ~masked.any(axis=1)  # nothing that the client favours is left: take what there is
    masked[lost] = left
    return masked / masked.sum(axis=1, keepdims=True)


def _check_min_size(min_size: int, task: Task) -> None:
    """Refuse a smallest client that cannot be had."""
    key = "data.partition.init_args.min_size"
    if min_size < 1:
        raise UserError(key, f"{min_size}", "give at least 1; no client can train on nothing")
    need = task.clients * min_size
    if need > len(task):
        raise UserError(
            key,
            f"{task.clients} clients x min_size {min_size} needs {need} samples, "
            f"the training set has {len(task)}",
            f"lower it to {len(task) // task.clients} or use fewer clients",
        )
