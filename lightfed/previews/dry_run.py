"""Rounds that train nothing: who would train what where, and what would be sent.

The algorithm's own `round` runs on a `Fleet` of which this process holds no client. No row is made,
sessions are only written down, and the ledger counts what goes up and down.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.api.fleet import Fleet
from lightfed.distributed.collectives import Ranks


class PlannedRanks(Ranks):
    """The ranks of a run that is planned; this process is none of them.

    Args:
        world: how many there are.
    """

    def __init__(self, world: int) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world = -1, world

    @override
    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        return tensor


class Sessions(NamedTuple):
    """Sessions that run side by side: of one call of `train`.

    Attributes:
        counts: (cohorts, ranks) of them.
        loads: (ranks,) sum of their costs, in samples x FLOPs or seconds.
        longest: the largest cost.
    """

    counts: np.ndarray
    loads: np.ndarray
    longest: float


class DryFleet(Fleet):
    """A fleet whose rounds only count; its `ranks` are `PlannedRanks`.

    Attributes:
        calls: of `train`, in all rounds.
        sums: of the ledger, over all rounds.
        bound: what these bytes are: "at most" so many where masks, which come with training, save
            some; "at least" where clients send what only training can tell, which is not counted.
        others: bytes that rows of other ranks may take, where clients hear each other.
    """

    calls: list[Sessions]
    sums: dict[str, float]
    bound: str = ""
    others: int = 0

    def run(self, rounds: int) -> None:
        """The first rounds."""
        self.calls, self.sums = [], defaultdict(float)
        for t in range(rounds):
            self.open_round()
            self.algorithm.round(self, t)
            for name, value in self.close_round().items():
                self.sums[name] += value

    def sessions(self, clients: Sequence[int], steps: Mapping[int, int] | None = None) -> Sessions:
        """What clients that have ranks would do."""
        world, costs = self.ranks.world, self._costs(clients, steps)
        counts, loads = np.zeros((len(self.cohorts), world), dtype=np.int64), np.zeros(world)
        for client, cost in costs.items():
            counts[self.cohort_of(client), self.home(client)] += 1
            loads[self.home(client)] += cost
        return Sessions(counts, loads, max(costs.values(), default=0.0))

    @override
    def train(
        self, clients: Sequence[int], t: int, *, steps: Mapping[int, int] | None = None
    ) -> None:
        self._open(clients)
        self.calls.append(self.sessions(clients, steps))

    @override
    def exchange(
        self,
        hears: Mapping[int, Sequence[int]],
        *,
        masks: Mapping[int, Tensor] | None = None,
        **_: Any,
    ) -> None:
        """The bytes of whole rows."""
        self.bound = self.bound if masks is None else "at most"
        layout = self.cohorts[0].layout
        if self.ranks.world > 1:  # blocks that come and go are no larger than the rows of all
            self.others = min(self._exchange_buffer, 6 * self.clients * 4 * layout.size)
        size = 4 * layout.floats.numel + 8 * layout.integers.numel
        for receiver, senders in hears.items():
            for sender in senders:
                self.ledger.sent_up(sender, size)
                self.ledger.sent_down(receiver, size)

    @override
    def collect(self, mine: Mapping[int, Any]) -> dict[int, Any]:
        """Of nobody; where it says what clients send, that is 0."""
        self.bound = "at least"
        return defaultdict(int)
