"""Who hears whom in a federation without a server: DisPFL's three graphs, and others.

A topology is a class whose arguments are config keys. `hearing` gives the lists of one round.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from lightfed.topology.graphs import random_regular, small_world
from lightfed.topology.matrices import read_adjacency
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

_KEY = "model.algorithm.init_args.topology.init_args"


class Topology(ABC):
    """Who hears whom. Whatever is drawn is named by (seed, purpose, round, client).

    Attributes:
        varies: a new graph every round.
    """

    varies: ClassVar[bool] = False

    def check(self, clients: int) -> None:  # noqa: B027 - some graphs exist for any number
        """Refuse a number of clients for which there is no such graph.

        Raises:
            UserError: naming the argument that does not fit it.
        """

    @abstractmethod
    def hears(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        """Whom a client hears in round t: ascending, without itself.

        Args:
            client: 0 .. clients - 1.
            t: the round; graphs that do not vary take no notice of it.
            clients: how many there are; `check` has passed it.
            seed: of the run.
        """


def hearing(
    topology: Topology,
    t: int,
    *,
    clients: int,
    seed: int,
    active: Collection[int] | None = None,
) -> dict[int, list[int]]:
    """For each active client, ascending, those that it hears in round t.

    As in DisPFL's code an inactive client is drawn like any other and drops out afterwards: it
    hears nobody and nobody hears it.

    Args:
        topology: which has checked the number of clients.
        t: the round.
        clients: how many there are.
        seed: of the run.
        active: None for all clients.
    """
    if active is None:
        return {k: topology.hears(k, t, clients=clients, seed=seed) for k in range(clients)}
    present = frozenset(active)
    return {
        k: [j for j in topology.hears(k, t, clients=clients, seed=seed) if j in present]
        for k in sorted(present)
    }


def warning_of_lonely(topology: Topology, *, clients: int, seed: int) -> str | None:
    """Clients that hear nobody, named, where the graph is always the same; None without any."""
    if topology.varies:
        return None
    lists = hearing(topology, 0, clients=clients, seed=seed)
    lonely = [client for client, heard in lists.items() if not heard]
    if not lonely:
        return None
    names = ", ".join(map(str, lonely[:10]))
    more = "" if len(lonely) <= 10 else f" and {len(lonely) - 10} more"
    return f"the topology leaves clients {names}{more} alone: they hear nobody"


@dataclass(frozen=True)
class Ring(Topology):
    """Everybody hears the one before and the one after."""

    @override
    def hears(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return sorted({(client - 1) % clients, (client + 1) % clients} - {client})


@dataclass(frozen=True)
class Full(Topology):
    """Everybody hears everybody."""

    @override
    def hears(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return [*range(client), *range(client + 1, clients)]


@dataclass(frozen=True)
class TimeVarying(Topology):
    """Everybody hears some others, drawn anew for each client and round (DisPFL).

    The graph is directed: whom I hear need not hear me. The draws are uniform without replacement.
    """

    varies: ClassVar[bool] = True

    neighbours: int = 10
    """Others that a client hears."""

    def __post_init__(self) -> None:
        _need(self.neighbours >= 1, "neighbours", self.neighbours, "give at least 1")

    @override
    def check(self, clients: int) -> None:
        _check_others("neighbours", self.neighbours, clients)

    @override
    def hears(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        rng = numpy_generator(seed, "neighbours", t, client)
        drawn = np.sort(rng.choice(clients - 1, self.neighbours, replace=False, shuffle=False))
        return (drawn + (drawn >= client)).tolist()


@dataclass(frozen=True)
class Torus(Topology):
    """The clients lie row by row on a grid without borders and hear the four beside them.

    In a single row or column, or two, some of the four coincide.
    """

    rows: int | None = None
    """Rows of the grid; null for the grid nearest to a square."""

    def __post_init__(self) -> None:
        _need(self.rows is None or self.rows >= 1, "rows", self.rows, "give at least 1")

    @override
    def check(self, clients: int) -> None:
        rows = self._rows(clients)
        found = f"{clients} clients do not fill {rows} rows"
        _need(clients % rows == 0, "rows", found, "give a divisor of the number of clients")
        found = f"{clients} clients form no grid but a single row"
        _need(self.rows is not None or rows > 1, "rows", found, "change their number, or take Ring")

    def _rows(self, clients: int) -> int:
        if self.rows is not None:
            return self.rows
        return next(rows for rows in range(math.isqrt(clients), 0, -1) if clients % rows == 0)

    @override
    def hears(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        rows = self._rows(clients)
        columns = clients // rows
        row, column = divmod(client, columns)
        above, below = (row - 1) % rows * columns + column, (row + 1) % rows * columns + column
        left, right = row * columns + (column - 1) % columns, row * columns + (column + 1) % columns
        return sorted({above, below, left, right} - {client})


@dataclass(frozen=True)
class RandomRegular(Topology):
    """Everybody has equally many neighbours, both ways, drawn once for all rounds."""

    degree: int
    """Neighbours of a client; degree times clients is even."""

    def __post_init__(self) -> None:
        _need(self.degree >= 1, "degree", self.degree, "give at least 1")

    @override
    def check(self, clients: int) -> None:
        _check_others("degree", self.degree, clients)
        found = f"{clients} clients of {self.degree} neighbours each, both odd numbers"
        _need(clients * self.degree % 2 == 0, "degree", found, "make one of them even")

    @override
    def hears(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return list(random_regular(clients, self.degree, seed=seed)[client])


@dataclass(frozen=True)
class SmallWorld(Topology):
    """A ring of near neighbours with shortcuts, both ways, drawn once (Watts and Strogatz 1998)."""

    neighbours: int
    """The nearest on the ring, half of them on either side: an even number."""
    rewire: float
    """Probability with which an edge of the ring becomes one to anybody."""

    def __post_init__(self) -> None:
        even = self.neighbours >= 2 and self.neighbours % 2 == 0
        _need(even, "neighbours", self.neighbours, "give an even number of at least 2")
        found = f"{self.rewire} is no probability"
        _need(0.0 <= self.rewire <= 1.0, "rewire", found, "give a number from 0 to 1")

    @override
    def check(self, clients: int) -> None:
        _check_others("neighbours", self.neighbours, clients)

    @override
    def hears(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return list(small_world(clients, self.neighbours, self.rewire, seed=seed)[client])


@dataclass(frozen=True)
class Star(Topology):
    """One client hears all others, and they hear it alone."""

    centre: int = 0
    """Number of the client in the middle."""

    def __post_init__(self) -> None:
        _need(self.centre >= 0, "centre", self.centre, "give the number of a client")

    @override
    def check(self, clients: int) -> None:
        found = f"client {self.centre} of {clients}"
        _need(self.centre < clients, "centre", found, f"give 0 to {clients - 1}")

    @override
    def hears(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        if client != self.centre:
            return [self.centre]
        return Full().hears(client, t, clients=clients, seed=seed)


class Adjacency(Topology):
    """A graph of the user's own, the same in all rounds; it need not be symmetric."""

    def __init__(self, matrix: list[list[int]] | str) -> None:
        """Read the graph.

        Args:
            matrix: K rows of K zeros and ones, or a .npy or .csv file with them; a one in row k and
                column j lets client k hear client j. The diagonal has no meaning.
        """
        self._heard = read_adjacency(matrix, key=f"{_KEY}.matrix")

    @override
    def check(self, clients: int) -> None:
        size = len(self._heard)
        found = f"{size} rows and columns, for {clients} clients"
        _need(size == clients, "matrix", found, "give a row and a column for each client")

    @override
    def hears(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        assert len(self._heard) == clients, "check has refused this"
        return np.flatnonzero(self._heard[client]).tolist()


def _need(fits: bool, name: str, found: object, fix: str) -> None:
    if not fits:
        raise UserError(f"{_KEY}.{name}", f"{found}", fix)


def _check_others(name: str, wanted: int, clients: int) -> None:
    found = f"{wanted} neighbours, but each of {clients} clients has {clients - 1} others"
    _need(wanted < clients, name, found, "lower it, or raise the number of clients (model.cohorts)")
