"""Random graphs that are drawn once, by networkx.

A graph is a tuple of ascending neighbour lists, one per client. It depends only on its arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from lightfed.utils.rng import derive_seed

if TYPE_CHECKING:
    import networkx as nx  # takes a second, and most runs do not need it

Lists = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4)
def random_regular(clients: int, degree: int, *, seed: int) -> Lists:
    """An undirected graph in which every client has `degree` neighbours, drawn by (seed, "graph").

    If more than half of all edges exist, the missing ones are drawn instead: networkx pairs the
    ends of edges until no client is its own neighbour, which a dense graph seldom gives.
    """
    import networkx as nx

    drawn = min(degree, clients - 1 - degree)
    graph = nx.random_regular_graph(drawn, clients, seed=derive_seed(seed, "graph"))
    return _ascending(graph if drawn == degree else nx.complement(graph))


@lru_cache(maxsize=4)
def small_world(clients: int, neighbours: int, rewire: float, *, seed: int) -> Lists:
    """Watts and Strogatz's graph (Nature 393, 1998), drawn by (seed, "graph").

    `neighbours` is even. Each edge of the ring is rewired with probability `rewire`.
    """
    import networkx as nx

    seed = derive_seed(seed, "graph")
    return _ascending(nx.watts_strogatz_graph(clients, neighbours, rewire, seed=seed))


def _ascending(graph: nx.Graph) -> Lists:
    return tuple(tuple(sorted(graph[client])) for client in range(len(graph)))
