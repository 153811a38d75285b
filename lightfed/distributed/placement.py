"""Assigns clients to ranks, longest session first, without communication.

Every rank computes the same assignment. The cost of a session is measured in seconds per sample, by
group. Until there are measurements, it is samples x FLOPs.
"""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

# The number of recent sessions of a group whose median is its rate.
_RECENT = 64


def place(costs: Mapping[int, float], *, ranks: int) -> dict[int, int]:
    """Assign every client to a rank: the costliest first, each to the rank with the least load.

    Among equals, the client and the rank with the lower number come first, so that all ranks have
    the same result.

    Args:
        costs: The cost of each client's session, in any unit.
        ranks: The number of ranks.

    Returns:
        The rank of each client.
    """
    loads = [(0.0, rank) for rank in range(ranks)]  # a heap: the least load is in front
    rank_of: dict[int, int] = {}
    for client in sorted(costs, key=lambda client: (-costs[client], client)):
        load, rank = heapq.heappop(loads)
        rank_of[client] = rank
        heapq.heappush(loads, (load + costs[client], rank))
    return rank_of


def cut(members: Sequence[int], most: int) -> list[list[int]]:
    """Cut a sequence, in order, into the fewest packs of at most `most` members.

    The packs are of nearly equal size.
    """
    count = math.ceil(len(members) / most)
    ends = [len(members) * i // count for i in range(count + 1)]
    return [list(members[start:stop]) for start, stop in pairwise(ends)]


def split(members: Sequence[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Return lists of the members that have the same key, in the order of their first members."""
    members_of_key: dict[Hashable, list[int]] = {}
    for member in members:
        members_of_key.setdefault(key(member), []).append(member)
    return list(members_of_key.values())


def blocks(counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the block of every client that keeps its row; all clients of a block have one home.

    A block is a number of consecutive clients of a group. The last one of a group can be smaller.

    Args:
        counts: The number of clients of each group.
        sizes: The number of clients of a block, for each group.
    """
    block_of_client: list[int] = []
    for count, size in zip(counts, sizes, strict=True):
        first_block = block_of_client[-1] + 1 if block_of_client else 0
        block_of_client += [first_block + client // size for client in range(count)]
    return block_of_client


class Rates:
    """Measured seconds per sample, by group.

    A rate is a median, because the first session of a process is slow and any can be disturbed.
    Every rank adds the same gathered reports in the same order, so all have the same rates.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))

    def add(self, group: int, *, samples: int, seconds: float) -> None:
        """Add a session of a group; one without samples or time is ignored."""
        if samples > 0 and 0 < seconds < math.inf:
            self._recent[group].append(seconds / samples)

    def of(self, groups: Iterable[int]) -> dict[int, float] | None:
        """Return the seconds per sample of some groups; None if one has not been measured."""
        wanted = set(groups)
        if not wanted <= self._recent.keys():
            return None
        return {group: median(self._recent[group]) for group in sorted(wanted)}
