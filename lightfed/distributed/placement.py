"""Assigns clients to ranks: longest first, the same on every rank without communication.

The cost of a session is measured in seconds per sample, by group. Until there are measurements it
is samples x FLOPs.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lightfed.distributed.collectives import Ranks
from lightfed.utils.atomic_io import read
from lightfed.utils.errors import UserError

RATES = "lightfed_rates"  # key in a checkpoint
_RECENT = 64  # sessions per group; its rate is their median
# Moving rows has to save this share of the slowest rank's time, beyond what it costs: seconds to
# meet, and the bytes at the speed (per second) of a slow network.
_SAVED, _MEETING, _SPEED = 0.1, 0.05, 1e8
_EVEN = 1.02  # times the mean: the slowest rank is quick enough


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


def exchanges(
    costs: Mapping[int, float],
    homes: Mapping[int, int],
    groups: Sequence[int],
    sizes: Sequence[int],
    *,
    ranks: int,
) -> list[tuple[int, int]]:
    """Pairs of clients that change places before a round, so that its slowest rank has less to do.

    The slowest rank gives a participant to the least busy one, for a client of the same group that
    takes no part or has a shorter session: every rank keeps its number of rows, and its memory. A
    pair closes about half of the gap between the two. The first pairs are taken, up to the one
    after which the slowest rank's sessions and the sending of rows take the least time. `costs` are
    seconds of the participants' sessions, `homes` the ranks of clients, `groups` ascend over all
    clients, and `sizes` are bytes of a row by group. The pairs are disjoint; there are none unless
    a tenth of the slowest rank's time is saved.
    """
    on: list[list[int]] = [[] for _ in range(ranks)]
    for client in sorted(costs):
        on[homes[client]].append(client)
    loads, sent = np.array([sum(costs[k] for k in own) for own in on]), np.zeros(ranks)
    mean, least, taken = sum(loads.tolist()) / ranks, (1 - _SAVED) * loads.max(), 0
    pairs: list[tuple[int, int]] = []
    while loads.max() > _EVEN * mean and mean + _MEETING < least:  # else nothing could pay
        high, low, pair = _pair(on, loads, costs, homes, groups, {j for _, j in pairs})
        if pair is None:
            break
        pairs.append(pair)
        on[high].remove(pair[0])
        if pair[1] in costs:
            on[low].remove(pair[1])
        loads[[high, low]] += (costs[pair[0]] - costs.get(pair[1], 0.0)) * np.array([-1, 1])
        sent[[high, low]] += sizes[groups[pair[0]]]
        time = loads.max() + sent.max() / _SPEED + _MEETING
        if time < least:
            least, taken = time, len(pairs)
    return pairs[:taken]


def _pair(
    on: Sequence[Sequence[int]],
    loads: np.ndarray,
    costs: Mapping[int, float],
    homes: Mapping[int, int],
    groups: Sequence[int],
    gone: Collection[int],
) -> tuple[int, int, tuple[int, int] | None]:
    """The slowest rank, the least busy one that it can relieve itself at, and how.

    `on` has, by rank, the participants that have not moved yet, and `loads` (ranks,) the seconds of
    their sessions. Clients that have moved without taking part are `gone`.
    """
    high, *others = np.argsort(-loads, kind="stable").tolist()

    def idle(rank: int, group: int) -> list[int]:
        span = range(bisect_left(groups, group), bisect_right(groups, group))
        free = (k for k in span if homes[k] == rank and k not in costs and k not in gone)
        return [*islice(free, 1)]

    for low in reversed(others):
        kinds = sorted({groups[k] for k in on[high]})
        theirs = [*on[low], *(k for kind in kinds for k in idle(low, kind))]
        gap = loads[high] - loads[low]
        less = np.subtract.outer([costs[k] for k in on[high]], [costs.get(k, 0.0) for k in theirs])
        alike = np.equal.outer([groups[k] for k in on[high]], [groups[k] for k in theirs])
        off = np.where(alike & (less > 0) & (less < gap), abs(less - gap / 2), math.inf)
        if off.size and off.min() < math.inf:
            i, j = divmod(int(off.argmin()), len(theirs))
            return high, low, (on[high][i], theirs[j])
    return high, high, None


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


class Blocks:
    """Clients that keep rows, in blocks of consecutive ones of a group; a block has one home.

    Args:
        counts: clients of each group.
        sizes: clients of a block, by group; the last block of a group may be smaller.

    Attributes:
        kind: of every block; blocks of a kind have as many clients of one group.
        kinds: group and number of clients of each kind.
    """

    def __init__(self, counts: Sequence[int], sizes: Sequence[int]) -> None:
        self._members: list[range] = []
        self.kind: list[int] = []
        self.kinds: list[tuple[int, int]] = []
        self._of: list[int] = []
        end = 0
        for group, (count, size) in enumerate(zip(counts, sizes, strict=True)):
            first, end = end, end + count
            for start in range(first, end, size):
                members = range(start, min(start + size, end))
                if not self.kinds or self.kinds[-1] != (group, len(members)):
                    self.kinds.append((group, len(members)))
                self._of += [len(self._members)] * len(members)
                self._members.append(members)
                self.kind.append(len(self.kinds) - 1)

    def __len__(self) -> int:
        return len(self._members)

    def of(self, client: int) -> int:
        """The block of a client."""
        return self._of[client]

    def members(self, block: int) -> range:
        """Its clients."""
        return self._members[block]

    def pairs(self, one: int, other: int) -> list[tuple[int, int]]:
        """The clients of two blocks of one kind, as they change places."""
        return [*zip(self._members[one], self._members[other], strict=True)]


class Rates:
    """Measured seconds per sample, by group.

    The rate is a median because the first session of a process is slow and any may be disturbed.
    Every rank adds the same gathered reports in the same order, so all have the same rates.
    """

    def __init__(self, recent: Mapping[int, Iterable[float]] | None = None) -> None:
        self._recent = {
            group: deque(seconds, maxlen=_RECENT) for group, seconds in (recent or {}).items()
        }

    def add(self, group: int, *, samples: int, seconds: float) -> None:
        """Add a session; one without samples or time is ignored."""
        if samples > 0 and 0 < seconds < math.inf:
            if group not in self._recent:
                self._recent[group] = deque(maxlen=_RECENT)
            self._recent[group].append(seconds / samples)

    def of(self, groups: Iterable[int]) -> dict[int, float] | None:
        """Seconds per sample by group; None unless all have been measured."""
        asked = set(groups)
        if not asked <= self._recent.keys():
            return None
        return {group: median(self._recent[group]) for group in sorted(asked)}

    def state_dict(self) -> dict[int, list[float]]:
        """For a checkpoint: primitives."""
        return {group: list(recent) for group, recent in self._recent.items()}

    @classmethod
    def of_checkpoint(cls, path: str | Path | None, ranks: Ranks) -> "Rates":
        """The rates saved in a checkpoint; called by every rank.

        Empty without a path, or if the file cannot be read: the code that resumes from it reports
        that. Rank 0 reads the main file.
        """
        state: dict[int, list[float]] = {}
        if path is not None and ranks.rank == 0:
            state = _read(Path(path))
        return cls(ranks.broadcast(state))


def _read(path: Path) -> dict[int, list[float]]:
    try:
        checkpoint: Any = read(path)
    except UserError:
        return {}
    with suppress(AttributeError, TypeError, ValueError):  # likewise
        found = checkpoint.get(RATES, {})
        return {int(group): [float(s) for s in recent] for group, recent in found.items()}
    return {}
