"""What a run says of its graph: for its log and its environment.json."""

from lightfed.topology.graphs import degrees, spectral_gap
from lightfed.topology.topology import Topology, graph, hearing

LARGEST = 1000  # clients whose spectral gap is worth half a second


def graph_facts(topology: Topology, *, clients: int, seed: int) -> dict[str, str | int | float]:
    """Of the graph of round 0: its class, how many a client hears, and its spectral gap."""
    facts: dict[str, str | int | float] = {"class": type(topology).__name__}
    if clients > LARGEST:
        heard = [len(h) for h in hearing(topology, 0, clients=clients, seed=seed).values()]
        least, mean, most = min(heard), sum(heard) / clients, max(heard)
    else:
        matrix = graph(topology, 0, clients=clients, seed=seed)
        least, mean, most = degrees(matrix)
        facts["spectral_gap"] = spectral_gap(matrix)
    return facts | {"least_heard": least, "mean_heard": mean, "most_heard": most}
