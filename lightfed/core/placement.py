"""Clients to ranks: longest first, the same on every rank without communication."""

import heapq
from collections.abc import Mapping


def place(costs: Mapping[int, float], *, ranks: int) -> dict[int, int]:
    """Give every client a rank, longest processing time first.

    Args:
        costs: client -> cost of its session (samples x forward FLOPs of its cohort).
        ranks: world size.

    Returns:
        client -> rank. Ties go to the lower client and the lower rank, so the answer is a function
        of its arguments.
    """
    if ranks == 1:
        return dict.fromkeys(costs, 0)
    loads = [(0.0, rank) for rank in range(ranks)]
    owner: dict[int, int] = {}
    for client in sorted(costs, key=lambda k: (-costs[k], k)):
        load, rank = heapq.heappop(loads)
        owner[client] = rank
        heapq.heappush(loads, (load + costs[client], rank))
    return owner
