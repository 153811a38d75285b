"""Assigns clients to ranks: longest first, the same on every rank without communication.

The cost of a session is measured in seconds per sample, by group. Until there are measurements it
is samples x FLOPs.
"""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

_RECENT = 64  # sessions per group; its rate is their median


def place(costs: Mapping[int, float], *, ranks: int) -> dict[int, int]:
    """Assign every client to a rank, longest processing time first.

    Ties go to the lower client and the lower rank, so the result is deterministic.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owner: dict[int, int] = {}
    for client in sorted(costs, key=lambda k: (-costs[k], k)):
        load, rank = heapq.heappop(loads)
        owner[client] = rank
        heapq.heappush(loads, (load + costs[client], rank))
    return owner


def cut(members: Sequence[int], most: int) -> list[list[int]]:
    """Members in order, in the fewest packs of at most `most`, of nearly equal size."""
    count = math.ceil(len(members) / most)
    ends = [len(members) * i // count for i in range(count + 1)]
    return [[*members[a:b]] for a, b in pairwise(ends)]


def split(members: Sequence[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Members by their key, in the order of its first member."""
    found: dict[Hashable, list[int]] = {}
    for member in members:
        found.setdefault(key(member), []).append(member)
    return [*found.values()]


def blocks(counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The block of every client that keeps its row; a block has one home.

    Blocks are consecutive clients of a group. The last one of a group may be smaller.

    Args:
        counts: clients of each group.
        sizes: clients of a block, by group.
    """
    found: list[int] = []
    for count, size in zip(counts, sizes, strict=True):
        first = found[-1] + 1 if found else 0
        found += [first + client // size for client in range(count)]
    return found


class Rates:
    """Measured seconds per sample, by group.

    The rate is a median because the first session of a process is slow and any may be disturbed.
    Every rank adds the same gathered reports in the same order, so all have the same rates.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))

    def add(self, group: int, *, samples: int, seconds: float) -> None:
        """Add a session; one without samples or time is ignored."""
        if samples > 0 and 0 < seconds < math.inf:
            self._recent[group].append(seconds / samples)

    def of(self, groups: Iterable[int]) -> dict[int, float] | None:
        """Seconds per sample by group; None unless all have been measured."""
        asked = set(groups)
        if not asked <= self._recent.keys():
            return None
        return {group: median(self._recent[group]) for group in sorted(asked)}
