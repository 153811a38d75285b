"""Dry runs of rounds: which clients would train where, and what would be sent.

The algorithm's `round` runs on a `Fleet` whose clients are all on other ranks. No rows are created,
sessions are only recorded, and the ledger counts the bytes up and down.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.api.fleet import Fleet
from lightfed.distributed.collectives import Ranks
from lightfed.local.local_work import Phase

T = TypeVar("T")


class PlannedRanks(Ranks):
    """The ranks of a planned run; this process is not one of them."""

    def __init__(self, world: int) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world = -1, world

    @property
    @override
    def alone(self) -> bool:
        return False

    @override
    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        return tensor


class Sessions(NamedTuple):
    """The sessions of one call of `train`, which run in parallel.

    `counts` are (groups, ranks) sessions; `loads` (ranks,) are sums of their costs, in samples x
    FLOPs.
    """

    counts: np.ndarray
    loads: np.ndarray


class DryFleet(Fleet):
    """A fleet whose rounds only count; its `ranks` are `PlannedRanks`.

    Attributes:
        calls: of `train`, in all rounds.
        sums: of the ledger, over all rounds.
        bound: "at most" if masks, known only after training, reduce these bytes; "at least" if
            clients also send data whose size depends on training, which is not counted.
        others: bytes that rows of other ranks may take if clients exchange rows.
    """

    calls: list[Sessions]
    sums: dict[str, float]
    bound: str = ""
    others: int = 0

    def run(self, rounds: int) -> None:
        """The first rounds."""
        self.calls, self.sums = [], defaultdict(int)
        for t in range(rounds):
            self.open_round()
            self.algorithm.round(self, t)
            for name, value in self.close_round().items():
                self.sums[name] += value

    def sessions(self, clients: Sequence[int], steps: Mapping[int, int] | None = None) -> Sessions:
        """Record the sessions of clients placed on ranks."""
        world, costs = self.ranks.world, self.places.costs(clients, steps)
        counts, loads = np.zeros((len(self.groups), world), dtype=np.int64), np.zeros(world)
        for client, cost in costs.items():
            rank = self.places.owner[client]
            counts[self.group_of(client), rank] += 1
            loads[rank] += cost
        return Sessions(counts, loads)

    @override
    def train(
        self,
        clients: Sequence[int],
        t: int,
        *,
        steps: Mapping[int, int] | None = None,
        phases: Sequence[Phase] = (),
        repeat: int = 1,
    ) -> None:
        if phases:
            each = {k: self.data.num_batches(k) for k in clients}
            steps = {k: sum(self.work.phase(p, n) for p in phases) for k, n in each.items()}
        self.open_clients(clients)
        self.calls.append(self.sessions(clients, steps))
        given = steps or {}
        self.clock.trained({k: self._steps(k, given.get(k)) for k in clients}, t)
        for k in clients:
            state, samples = self.state(k), self.work.samples(self.data, k, given.get(k))
            self.ledger.computed(k, repeat * samples * state.passes * state.flops)

    def _steps(self, client: int, given: int | None) -> int:
        if given is not None:
            return self.work.limited(given)
        return self.work.batches(self.data.num_batches(client))

    @override
    def only_counts(self, senders: Mapping[int, Sequence[int]], *, masked: bool) -> bool:
        """Count the bytes of whole rows."""
        if masked:
            self.bound = "at most"
        layout = self.groups[0].layout
        owner = self.places.owner
        pairs = {(owner[k], j) for k, theirs in senders.items() for j in theirs}
        coming = Counter(rank for rank, sender in pairs if owner[sender] != rank)
        rows = max(coming.values(), default=0)
        self.others = max(self.others, 2 * rows * 4 * layout.size)  # as packages and as rows
        size = 4 * layout.floats.numel + 8 * layout.integers.numel
        for receiver, sources in senders.items():
            for sender in sources:
                self.ledger.sent_up(sender, size)
                self.ledger.sent_down(receiver, size)
        return True

    @override
    def once(self, jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Run no job: there are no rows to compute from."""
        return iter(())

    @override
    def collect(self, mine: Mapping[int, Any]) -> dict[int, Any]:
        """Gather from no client; sizes that clients would send count as 0."""
        self.bound = "at least"
        return defaultdict(int)
