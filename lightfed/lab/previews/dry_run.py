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
        self.rank = -1
        self.world = world

    @property
    @override
    def alone(self) -> bool:
        return False

    @override
    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        return tensor


class Sessions(NamedTuple):
    """The sessions of one call of `train`, which the ranks train at the same time.

    Attributes:
        counts: The number of sessions by group and rank, of shape (groups, ranks).
        loads: The sum of their costs on each rank in samples x FLOPs, of shape (ranks,).
    """

    counts: np.ndarray
    loads: np.ndarray


class DryFleet(Fleet):
    """A fleet whose rounds only count; its `ranks` are `PlannedRanks`.

    Attributes:
        calls: The sessions of each call of `train`, in all rounds.
        sums: The sums of the ledger over all rounds, by its columns.
        bound: "at most" if masks that are known only after training reduce the bytes. "at least" if
            clients also send data whose size depends on training, which is not counted.
        others: The bytes that rows of other ranks can take if clients exchange rows.
    """

    calls: list[Sessions]
    sums: dict[str, float]
    bound: str = ""
    others: int = 0

    def run(self, rounds: int) -> None:
        """Run the first rounds without training."""
        self.calls = []
        self.sums = defaultdict(int)
        for t in range(rounds):
            self.open_round()
            self.algorithm.round(self, t)
            for name, value in self.close_round().items():
                self.sums[name] += value

    def sessions(self, clients: Sequence[int], steps: Mapping[int, int] | None = None) -> Sessions:
        """Return the sessions of clients that are placed on ranks.

        Args:
            clients: The clients.
            steps: The number of batches in each client's session, where it differs from the
                configured number.
        """
        world = self.ranks.world
        counts = np.zeros((len(self.groups), world), dtype=np.int64)
        loads = np.zeros(world)
        for client, cost in self.places.costs(clients, steps).items():
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
        steps_of_client: dict[int, int] = dict(steps or {})
        if phases:
            for client in clients:
                batches = self.data.num_batches(client)
                steps_of_client[client] = sum(self.work.phase(phase, batches) for phase in phases)

        self.open_clients(clients)
        if self.work.seconds is not None:
            self.check_own_length(bool(steps_of_client))
            steps_of_client = self.steps_in_time(clients, t, repeat=repeat)
        self.calls.append(self.sessions(clients, steps_of_client or None))

        trained_steps = {
            client: self._trained_steps(client, steps_of_client.get(client)) for client in clients
        }
        self.clock.trained(trained_steps, t)

        for client in clients:
            state = self.state(client)
            samples = self.work.samples(self.data, client, steps_of_client.get(client))
            self.ledger.computed(client, repeat * samples * state.passes * state.flops)

    def _trained_steps(self, client: int, steps: int | None) -> int:
        """Return the number of batches that a client trains on.

        Args:
            client: The client.
            steps: The number that the algorithm asks for; None for the configured one.
        """
        if steps is not None:
            return self.work.limited(steps)
        return self.work.batches(self.data.num_batches(client))

    @override
    def only_counts(self, senders: Mapping[int, Sequence[int]], *, masked: bool) -> bool:
        """Count the bytes of whole rows that clients send to each other.

        Args:
            senders: The clients that each receiver gets the rows of.
            masked: Whether only the entries within masks are sent.
        """
        if masked:
            self.bound = "at most"
        layout = self.groups[0].layout

        # A rank gets the row of a sender once for all of its receivers.
        rank_of = self.places.owner
        deliveries = set()
        for receiver, sources in senders.items():
            for sender in sources:
                if rank_of[sender] != rank_of[receiver]:
                    deliveries.add((rank_of[receiver], sender))
        rows_on_rank = Counter(rank for rank, _ in deliveries)
        most_rows = max(rows_on_rank.values(), default=0)

        # A row is in memory twice: as a package and as a row.
        self.others = max(self.others, 2 * most_rows * 4 * layout.size)

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
