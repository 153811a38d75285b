"""Assigns clients to ranks: longest first, the same on every rank without communication.

The cost of a session is measured in seconds per sample, by group. Until there are measurements it
is samples x FLOPs.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from lightfed.distributed.collectives import Ranks
from lightfed.utils.atomic_io import read
from lightfed.utils.errors import UserError

RATES = "lightfed_rates"  # key in a checkpoint
_RECENT = 64  # sessions per group; its rate is their median


def place(costs: Mapping[int, float], *, ranks: int) -> dict[int, int]:
    """Assign every client to a rank, longest processing time first.

    Args:
        costs: client -> cost of its session.
        ranks: world size.

    Returns:
        client -> rank. Ties go to the lower client and the lower rank, so the result is
        deterministic.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owner: dict[int, int] = {}
    for client in sorted(costs, key=lambda k: (-costs[k], k)):
        load, rank = heapq.heappop(loads)
        owner[client] = rank
        heapq.heappush(loads, (load + costs[client], rank))
    return owner


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
        """Add a session; one without samples or time is ignored.

        Args:
            group: of its client in this round.
            samples: processed; a sample counts once per epoch.
            seconds: of the whole session.
        """
        if samples > 0 and 0 < seconds < math.inf:
            recent = self._recent.setdefault(group, deque(maxlen=_RECENT))
            recent.append(seconds / samples)

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

        Empty if the file cannot be read: the code that resumes from it reports that.

        Args:
            path: of the main file; rank 0 reads it. None for no checkpoint.
            ranks: of the run.
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
