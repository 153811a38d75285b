"""Summary of a run's graph for the log and environment.json."""

from collections.abc import Collection

import numpy as np

from lightfed.topology.topology import Topology, round_senders

LARGEST = 1000  # clients; the spectral gap of more takes over half a second


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
