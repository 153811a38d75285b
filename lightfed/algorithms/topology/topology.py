"""Communication graphs of a federation without a server: DisPFL's three graphs and others.

A topology is a class whose arguments are config keys. `round_senders` is the graph of a round.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
from typing_extensions import override

from lightfed.algorithms.topology.matrices import read_adjacency
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.recorded import Recorded
from lightfed.utils.rng import derive_seed, numpy_generator

_KEY = "model.algorithm.init_args.topology.init_args"


class Topology(Recorded, ABC):
    """The senders of every client. All draws are named by (seed, purpose, round, client)."""

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

    neighbours: int = 10
    """Number of other clients that a client receives from."""

    def __post_init__(self) -> None:
        _need(self.neighbours >= 1, "neighbours", self.neighbours, "give at least 1")

    @override
    def check(self, clients: int) -> None:
        found = f"{self.neighbours}, but each of {clients} clients has {clients - 1} others"
        fix = "lower it, or raise the number of clients (model.clients)"
        _need(self.neighbours < clients, "neighbours", found, fix)

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        rng = numpy_generator(seed, "neighbours", t, client)
        drawn = np.sort(rng.choice(clients - 1, self.neighbours, replace=False, shuffle=False))
        return (drawn + (drawn >= client)).tolist()


class NetworkX(Topology):
    """A graph of networkx, drawn once for all rounds; every edge is in both directions.

    Such as `random_regular_graph`, `watts_strogatz_graph`, `star_graph`, or `grid_2d_graph` with
    `periodic`. Its nodes in ascending order are the clients.
    """

    def __init__(self, generator: str, arguments: dict[str, Any]) -> None:
        """Name the graph.

        Args:
            generator: the name of a function of networkx that makes a graph.
            arguments: its arguments by name. Without a `seed` among them, that of the run names
                the draw.
        """
        self.generator, self.arguments = generator, arguments
        self._drawn: dict[int, list[list[int]]] = {}

    @override
    def check(self, clients: int) -> None:
        nodes = len(self._senders(0))
        found = f"a graph of {nodes} nodes, for {clients} clients"
        _need(nodes == clients, "arguments", found, "give a node for each client")

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return list(self._senders(seed)[client])

    def _senders(self, seed: int) -> list[list[int]]:
        if seed not in self._drawn:
            import networkx as nx  # takes a second

            make: Any = getattr(nx, self.generator, None)
            _need(callable(make), "generator", f"networkx has no {self.generator}", "name another")
            seeded = "seed" in signature(make).parameters
            named = {"seed": derive_seed(seed, "graph") % 2**32} if seeded else {}
            try:
                graph = make(**named | self.arguments).to_undirected()
            except (AttributeError, TypeError, ValueError, nx.NetworkXException) as error:
                fix = "give what networkx documents"
                raise UserError(f"{_KEY}.arguments", reason(error), fix) from error
            place = {node: i for i, node in enumerate(sorted(graph))}
            links = [{place[other] for other in graph[node]} for node in place]
            self._drawn[seed] = [sorted(own - {i}) for i, own in enumerate(links)]
        return self._drawn[seed]


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


def _need(fits: bool, name: str, found: object, fix: str) -> None:
    require(fits, f"{_KEY}.{name}", found, fix)
