"""Communication graphs of a federation without a server: DisPFL's three graphs and others.

A topology is a class whose arguments are config keys. `round_senders` is the graph of a round.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from typing_extensions import override

from lightfed.topology.matrices import read_adjacency
from lightfed.utils.errors import require
from lightfed.utils.recorded import Recorded
from lightfed.utils.rng import derive_seed, numpy_generator

if TYPE_CHECKING:
    import networkx as nx  # takes a second, and most runs do not need it

Lists = tuple[tuple[int, ...], ...]

_KEY = "model.algorithm.init_args.topology.init_args"
LARGEST = 1000  # clients; the spectral gap of more takes over half a second


class Topology(Recorded, ABC):
    """The senders of every client. All draws are named by (seed, purpose, round, client).

    Attributes:
        varies: whether the graph changes every round.
    """

    varies: ClassVar[bool] = False

    def check(self, clients: int) -> None:
        """Reject a number of clients for which there is no such graph.

        Raises:
            UserError: names the argument that does not fit it.
        """

    @abstractmethod
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        """The senders to a client in round t: ascending, without itself.

        Args:
            client: 0 .. clients - 1.
            t: the round; ignored by graphs that do not vary.
            clients: number of clients, as passed to `check`.
            seed: of the run.
        """


def round_senders(
    topology: Topology, t: int, *, clients: int, seed: int, active: Collection[int] | None = None
) -> dict[int, list[int]]:
    """The ascending senders to each active client in round t.

    As in DisPFL's code, inactive clients are drawn like any other and drop out afterwards: they
    neither send nor receive. The topology has checked the number of clients. None of `active` is
    all of them.
    """
    if active is None:
        return {k: topology.senders(k, t, clients=clients, seed=seed) for k in range(clients)}
    present = frozenset(active)
    return {
        k: [j for j in topology.senders(k, t, clients=clients, seed=seed) if j in present]
        for k in sorted(present)
    }


def warning_of_isolated(topology: Topology, *, clients: int, seed: int) -> str | None:
    """Warning that names the clients without senders in a fixed graph; None if there are none."""
    if topology.varies:
        return None
    lists = round_senders(topology, 0, clients=clients, seed=seed)
    isolated = [client for client, senders in lists.items() if not senders]
    if not isolated:
        return None
    names = ", ".join(map(str, isolated[:10]))
    more = "" if len(isolated) <= 10 else f" and {len(isolated) - 10} more"
    return f"the topology isolates clients {names}{more}: they receive from no other client"


@dataclass(frozen=True)
class Ring(Topology):
    """Every client receives from the previous and the next one."""

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return sorted({(client - 1) % clients, (client + 1) % clients} - {client})


@dataclass(frozen=True)
class Full(Topology):
    """Every client receives from all others."""

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return [*range(client), *range(client + 1, clients)]


@dataclass(frozen=True)
class TimeVarying(Topology):
    """Every client receives from some others, redrawn for each client and round (DisPFL).

    The graph is directed. The draws are uniform without replacement.
    """

    varies: ClassVar[bool] = True

    neighbours: int = 10
    """Number of other clients that a client receives from."""

    def __post_init__(self) -> None:
        _need(self.neighbours >= 1, "neighbours", self.neighbours, "give at least 1")

    @override
    def check(self, clients: int) -> None:
        _check_others("neighbours", self.neighbours, clients)

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        rng = numpy_generator(seed, "neighbours", t, client)
        drawn = np.sort(rng.choice(clients - 1, self.neighbours, replace=False, shuffle=False))
        return (drawn + (drawn >= client)).tolist()


@dataclass(frozen=True)
class Torus(Topology):
    """A grid without borders, filled row by row; clients receive from their four neighbours.

    With one or two rows or columns, some of the four coincide.
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
        found = f"{clients} clients only form a grid of a single row"
        _need(self.rows is not None or rows > 1, "rows", found, "change their number, or use Ring")

    def _rows(self, clients: int) -> int:
        if self.rows is not None:
            return self.rows
        return next(rows for rows in range(math.isqrt(clients), 0, -1) if clients % rows == 0)

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        rows = self._rows(clients)
        columns = clients // rows
        row, column = divmod(client, columns)
        above, below = (row - 1) % rows * columns + column, (row + 1) % rows * columns + column
        left, right = row * columns + (column - 1) % columns, row * columns + (column + 1) % columns
        return sorted({above, below, left, right} - {client})


@dataclass(frozen=True)
class RandomRegular(Topology):
    """An undirected graph with the same number of neighbours for all, drawn once for all rounds."""

    degree: int
    """Neighbours per client; degree times clients must be even."""

    def __post_init__(self) -> None:
        _need(self.degree >= 1, "degree", self.degree, "give at least 1")

    @override
    def check(self, clients: int) -> None:
        _check_others("degree", self.degree, clients)
        found = f"{clients} clients of {self.degree} neighbours each, both odd numbers"
        _need(clients * self.degree % 2 == 0, "degree", found, "make one of them even")

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return list(_random_regular(clients, self.degree, seed=seed)[client])


@dataclass(frozen=True)
class SmallWorld(Topology):
    """An undirected ring with shortcuts, drawn once for all rounds (Watts and Strogatz 1998)."""

    neighbours: int
    """Number of nearest neighbours on the ring, half on either side; even."""
    rewire: float
    """Probability of rewiring an edge of the ring to a random client."""

    def __post_init__(self) -> None:
        even = self.neighbours >= 2 and self.neighbours % 2 == 0
        _need(even, "neighbours", self.neighbours, "give an even number of at least 2")
        found = f"{self.rewire} is not a probability"
        _need(0.0 <= self.rewire <= 1.0, "rewire", found, "give a number from 0 to 1")

    @override
    def check(self, clients: int) -> None:
        _check_others("neighbours", self.neighbours, clients)

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return list(_small_world(clients, self.neighbours, self.rewire, seed=seed)[client])


@dataclass(frozen=True)
class Star(Topology):
    """One client exchanges with all others, and they only with it."""

    centre: int = 0
    """Number of the central client."""

    def __post_init__(self) -> None:
        _need(self.centre >= 0, "centre", self.centre, "give the number of a client")

    @override
    def check(self, clients: int) -> None:
        found = f"client {self.centre} of {clients}"
        _need(self.centre < clients, "centre", found, f"give 0 to {clients - 1}")

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        if client != self.centre:
            return [self.centre]
        return Full().senders(client, t, clients=clients, seed=seed)


class Adjacency(Topology):
    """A graph given by the user, fixed for all rounds; it need not be symmetric."""

    def __init__(self, matrix: list[list[int]] | str) -> None:
        """Read the graph.

        Args:
            matrix: K rows of K zeros and ones, or a .npy or .csv file with them. A one in row k and
                column j lets client k receive from client j. The diagonal is ignored.
        """
        self._matrix = read_adjacency(matrix, key=f"{_KEY}.matrix")

    @override
    def check(self, clients: int) -> None:
        size = len(self._matrix)
        found = f"{size} rows and columns, for {clients} clients"
        _need(size == clients, "matrix", found, "give a row and a column for each client")

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        assert len(self._matrix) == clients, "check rejects this"
        return np.flatnonzero(self._matrix[client]).tolist()


def summarise(topology: Topology, *, clients: int, seed: int) -> dict[str, str | int | float]:
    """Class, in-degrees and spectral gap of the graph of round 0."""
    counts = [len(own) for own in round_senders(topology, 0, clients=clients, seed=seed).values()]
    summary: dict[str, str | int | float] = {"class": type(topology).__name__}
    if clients <= LARGEST:
        summary["spectral_gap"] = spectral_gap(graph(topology, 0, clients=clients, seed=seed))
    mean = sum(counts) / clients
    return summary | {"least_heard": min(counts), "mean_heard": mean, "most_heard": max(counts)}


def graph(
    topology: Topology, t: int, *, clients: int, seed: int, active: Collection[int] | None = None
) -> np.ndarray:
    """(K, K) bool; row k marks the senders to client k in round t (`round_senders`)."""
    matrix = np.zeros((clients, clients), dtype=np.bool_)
    for client, senders in round_senders(
        topology, t, clients=clients, seed=seed, active=active
    ).items():
        matrix[client, senders] = True
    return matrix


def spectral_gap(graph: np.ndarray) -> float:
    """How fast averaging over a graph (K, K) reaches consensus: 0 never, 1 at once.

    1 - |lambda_2| of W, the row-stochastic matrix of a plain mean over each client and its senders
    (D-PSGD: Lian et al. 2017, assumption 1, bounds |lambda_2|^2). For one client it is 1. Time
    grows with K^3: half a second for 1,000 clients.
    """
    if len(graph) == 1:
        return 1.0
    mixing = graph + np.eye(len(graph))
    mixing /= mixing.sum(axis=1, keepdims=True)
    return max(0.0, 1.0 - float(np.sort(np.abs(np.linalg.eigvals(mixing)))[-2]))


def _need(fits: bool, name: str, found: object, fix: str) -> None:
    require(fits, f"{_KEY}.{name}", found, fix)


def _check_others(name: str, wanted: int, clients: int) -> None:
    found = f"{wanted} neighbours, but each of {clients} clients has {clients - 1} others"
    _need(wanted < clients, name, found, "lower it, or raise the number of clients (model.clients)")


@lru_cache(maxsize=4)
def _random_regular(clients: int, degree: int, *, seed: int) -> Lists:
    """An undirected graph in which every client has `degree` neighbours, drawn by (seed, "graph").

    If more than half of all edges exist, the missing ones are drawn instead: networkx pairs the
    ends of edges until no client is its own neighbour, which a dense graph seldom gives.
    """
    import networkx as nx

    drawn = min(degree, clients - 1 - degree)
    graph = nx.random_regular_graph(drawn, clients, seed=derive_seed(seed, "graph"))
    return _ascending(graph if drawn == degree else nx.complement(graph))


@lru_cache(maxsize=4)
def _small_world(clients: int, neighbours: int, rewire: float, *, seed: int) -> Lists:
    """Watts and Strogatz's graph (Nature 393, 1998), drawn by (seed, "graph").

    `neighbours` is even. Each edge of the ring is rewired with probability `rewire`.
    """
    import networkx as nx

    seed = derive_seed(seed, "graph")
    return _ascending(nx.watts_strogatz_graph(clients, neighbours, rewire, seed=seed))


def _ascending(graph: "nx.Graph") -> Lists:
    return tuple(tuple(sorted(graph[client])) for client in range(len(graph)))
