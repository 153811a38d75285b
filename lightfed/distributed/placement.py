"""Clients to ranks: longest first, the same on every rank without communication.

What a session costs is measured as soon as it can be: seconds a sample, by cohort. Before that it
is samples x FLOPs.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from lightfed.distributed.collectives import Ranks
from lightfed.utils.atomic_io import read
from lightfed.utils.errors import UserError

RATES = "lightfed_rates"  # key in a checkpoint
_RECENT = 64  # sessions of a cohort that its rate is the median of


def place(costs: Mapping[int, float], *, ranks: int) -> dict[int, int]:
    """Give every client a rank, longest processing time first.

    Args:
        costs: client -> cost of its session.
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


class Rates:
    """Seconds a sample of the cohorts' sessions, as this run has measured them.

    A median, as the first session of a process is slow and any may be disturbed. Every rank adds
    the same gathered reports in the same order, so all have the same rates.
    """

    def __init__(self, recent: Mapping[int, Iterable[float]] | None = None) -> None:
        self._recent = {
            cohort: deque(seconds, maxlen=_RECENT) for cohort, seconds in (recent or {}).items()
        }

    def add(self, cohort: int, *, samples: int, seconds: float) -> None:
        """A session; one that trained on nothing, or was not timed, says nothing.

        Args:
            cohort: its client's, in this round.
            samples: processed; a sample counts once per epoch.
            seconds: of the whole session.
        """
        if samples > 0 and 0 < seconds < math.inf:
            recent = self._recent.setdefault(cohort, deque(maxlen=_RECENT))
            recent.append(seconds / samples)

    def of(self, cohorts: Iterable[int]) -> dict[int, float] | None:
        """Seconds a sample by cohort; None unless every one of them has been measured."""
        asked = set(cohorts)
        if not asked <= self._recent.keys():
            return None
        return {cohort: median(self._recent[cohort]) for cohort in sorted(asked)}

    def state_dict(self) -> dict[int, list[float]]:
        """For a checkpoint: primitives."""
        return {cohort: list(recent) for cohort, recent in self._recent.items()}

    @classmethod
    def of_checkpoint(cls, path: str | Path | None, ranks: Ranks) -> "Rates":
        """What a run had measured when it was saved; called by every rank.

        Nothing of a file that cannot be read, which whoever goes on from it has to say.

        Args:
            path: of the main file; rank 0 reads its own. None for no checkpoint.
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
    found = checkpoint.get(RATES, {}) if isinstance(checkpoint, dict) else {}
    return {int(cohort): [float(s) for s in recent] for cohort, recent in found.items()}
