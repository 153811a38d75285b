"""Communication graphs of a federation without a server: DisPFL's three graphs and others.

A topology is a class whose arguments are keys of the configuration. `round_senders` gives the graph
of a round.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
from typing_extensions import override

from lightfed.algorithms.topology.matrices import read_adjacency
from lightfed.utils.errors import UserError, reason
from lightfed.utils.recorded import Recorded
from lightfed.utils.rng import derive_seed, numpy_generator

_KEY = "model.algorithm.init_args.topology.init_args"


class Topology(Recorded, ABC):
    """Says who sends to every client. All draws are named by (seed, purpose, round, client)."""

    def check(self, clients: int) -> None:
        """Refuse a number of clients for which there is no such graph.

        Raises:
            UserError: It names the argument that does not fit.
        """

    @abstractmethod
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        """Return the senders to a client in round t, ascending and without the client itself.

        Args:
            client: Number of the client.
            t: The round; graphs that do not vary ignore it.
            clients: Number of clients, as passed to `check`.
            seed: Of the run.
        """


def round_senders(
    topology: Topology, t: int, *, clients: int, seed: int, active: Collection[int] | None = None
) -> dict[int, list[int]]:
    """Return the senders to each active client in round t, ascending.

    As in DisPFL's code, inactive clients are drawn like any other and drop out afterwards: they
    neither send nor receive.

    Args:
        topology: The graph; it has checked the number of clients.
        t: The round.
        clients: Number of clients.
        seed: Of the run.
        active: The active clients; None if all are active.
    """
    if active is None:
        return {k: topology.senders(k, t, clients=clients, seed=seed) for k in range(clients)}

    present = frozenset(active)
    senders_of = {}
    for client in sorted(present):
        senders = topology.senders(client, t, clients=clients, seed=seed)
        senders_of[client] = [sender for sender in senders if sender in present]
    return senders_of


@dataclass(frozen=True)
class Ring(Topology):
    """Every client receives from the previous and the next one."""

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        # A set: of two clients, the previous one is also the next one.
        beside = {(client - 1) % clients, (client + 1) % clients}
        return sorted(beside - {client})


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
        if self.neighbours < 1:
            raise UserError(f"{_KEY}.neighbours", str(self.neighbours), "give at least 1")

    @override
    def check(self, clients: int) -> None:
        if self.neighbours >= clients:
            raise UserError(
                f"{_KEY}.neighbours",
                f"{self.neighbours}, but each of {clients} clients has {clients - 1} others",
                "lower it, or raise the number of clients (model.clients)",
            )

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        rng = numpy_generator(seed, "neighbours", t, client)
        drawn = np.sort(rng.choice(clients - 1, self.neighbours, replace=False, shuffle=False))

        # Drawn among the others: from the client's own number on, they are one higher.
        others = np.where(drawn >= client, drawn + 1, drawn)
        return others.tolist()


class NetworkX(Topology):
    """A graph of networkx, drawn once for all rounds; every edge goes in both directions.

    Examples are `random_regular_graph`, `watts_strogatz_graph`, `star_graph`, and `grid_2d_graph`
    with `periodic`. The nodes in ascending order are the clients.
    """

    def __init__(self, generator: str, arguments: dict[str, Any]) -> None:
        """Name the graph.

        Args:
            generator: The name of a function of networkx that makes a graph.
            arguments: Its arguments by name. Without a `seed` among them, the seed of the run names
                the draw.
        """
        self.generator = generator
        self.arguments = arguments
        self._senders_by_seed: dict[int, list[list[int]]] = {}

    @override
    def check(self, clients: int) -> None:
        nodes = len(self._senders(0))
        if nodes != clients:
            raise UserError(
                f"{_KEY}.arguments",
                f"a graph of {nodes} nodes, for {clients} clients",
                "give a node for each client",
            )

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return list(self._senders(seed)[client])

    def _senders(self, seed: int) -> list[list[int]]:
        """Return the senders to each client; the graph is drawn once."""
        if seed not in self._senders_by_seed:
            graph = self._draw(seed)
            client_of = {node: client for client, node in enumerate(sorted(graph))}
            senders = []
            for node, client in client_of.items():
                neighbors = {client_of[neighbor] for neighbor in graph[node]}
                senders.append(sorted(neighbors - {client}))
            self._senders_by_seed[seed] = senders
        return self._senders_by_seed[seed]

    def _draw(self, seed: int) -> Any:
        """Return an undirected graph of networkx.

        Raises:
            UserError: networkx has no such function, or does not accept the arguments.
        """
        import networkx as nx  # takes a second

        make: Any = getattr(nx, self.generator, None)
        if not callable(make):
            raise UserError(
                f"{_KEY}.generator", f"networkx has no {self.generator}", "name another"
            )

        arguments = dict(self.arguments)
        if "seed" in signature(make).parameters:
            arguments.setdefault("seed", derive_seed(seed, "graph") % 2**32)
        try:
            return make(**arguments).to_undirected()
        except (AttributeError, TypeError, ValueError, nx.NetworkXException) as error:
            raise UserError(
                f"{_KEY}.arguments", reason(error), "give what networkx documents"
            ) from error


class Adjacency(Topology):
    """A graph that the user gives, fixed for all rounds; it need not be symmetric."""

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
        if size != clients:
            raise UserError(
                f"{_KEY}.matrix",
                f"{size} rows and columns, for {clients} clients",
                "give a row and a column for each client",
            )

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        assert len(self._matrix) == clients, "`check` refuses this"
        return np.flatnonzero(self._matrix[client]).tolist()
