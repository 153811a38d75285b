"""A round without training: who would train what where, and what would be sent.

The algorithm's own `round` runs on a fleet of which this process holds no client, so that no row
is ever made: sessions cost nothing and leave nothing, and the ledger counts what goes up and down.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.aggregation.coverage_cache import Parts
from lightfed.aggregation.gossip import Over
from lightfed.aggregation.group_mean import Group
from lightfed.api.fleet import Fleet, Weights
from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import place
from lightfed.state.server_model import ServerModel

T = TypeVar("T")


class NoRank(Ranks):
    """None of the ranks of a run, talking to nobody.

    Args:
        world: how many ranks the run has.
    """

    def __init__(self, world: int) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world = -1, world

    @override
    def _all_reduce(self, tensor: Tensor, op: object) -> Tensor:
        return tensor

    @override
    def gather(self, objects: list[T]) -> list[T]:
        return objects

    @override
    def any(self, flag: bool) -> bool:
        return flag

    @override
    def broadcast(self, obj: T) -> T:
        return obj

    @override
    def first(self, make: Callable[[], T]) -> T:
        return make()

    @override
    def barrier(self) -> None:
        """There is nobody to wait for."""


@dataclass(frozen=True)
class Call:
    """Sessions that run side by side: of one call of `train`.

    Attributes:
        costs: client -> cost of its session.
        owner: client -> rank.
        cohorts: client -> cohort, in this round.
    """

    costs: dict[int, float]
    owner: dict[int, int]
    cohorts: dict[int, int]


class Rehearsal(Fleet):
    """A fleet whose rounds only count; its `ranks` are `NoRank`.

    Attributes:
        calls: of `train`, in the round under way.
        at_most: bytes are those of whole rows, where masks, which come with training, save some.
        depends: what is sent depends on what is trained: what goes up is not counted, and what goes
            down is what is known without it.
        exchanges: clients hear each other.
    """

    calls: list[Call]
    at_most: bool
    depends: bool
    exchanges: bool

    @override
    def open_round(self) -> None:
        super().open_round()
        self.calls = []
        self.at_most = self.depends = self.exchanges = False

    def homes(self) -> dict[int, int]:
        """Client -> the rank that it has, or would have if it kept its row."""
        if self.algorithm.stateful:
            return self._owner
        return place(self._costs(range(self.clients)), ranks=self.ranks.world)

    @override
    def send(
        self,
        model: ServerModel,
        clients: Sequence[int],
        *,
        buffers: bool = True,
        tensors: Collection[str] | None = None,
        size: int | None = None,
    ) -> None:
        self.depends |= size is not None
        super().send(model, clients, buffers=buffers, tensors=tensors, size=size)

    @override
    def train(
        self, clients: Sequence[int], t: int, *, steps: Mapping[int, int] | None = None
    ) -> None:
        self._open(clients)
        owner = {k: self._owner[k] for k in clients}
        cohorts = {k: self.cohort_of(k) for k in clients}
        self.calls.append(Call(self._costs(clients, steps), owner, cohorts))

    @override
    def merge(
        self,
        clients: Sequence[int],
        *,
        into: ServerModel,
        weights: Weights | Mapping[int, float] = "samples",
        buffers: bool = True,
        tensors: Collection[str] | None = None,
        sent: Collection[int] | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> list[int]:
        parts = Parts.of(buffers=buffers, tensors=tensors)
        known = None if sizes is None else {k: sizes.get(k, 0) for k in clients}
        self._count_up(into, clients if sent is None else sorted(sent), parts, known)
        return list(clients)

    @override
    def exchange(
        self,
        hears: Mapping[int, Sequence[int]],
        *,
        masks: Mapping[int, Tensor] | None = None,
        keep: Mapping[int, Tensor] | None = None,
        over: Over = "covered",
    ) -> None:
        self.at_most |= masks is not None
        self.exchanges = True
        layout = self.cohorts[0].layout
        size = 4 * layout.floats.numel + 8 * layout.integers.numel
        for receiver in sorted(hears):
            for sender in hears[receiver]:
                self.ledger.sent_up(sender, size)
                self.ledger.sent_down(receiver, size)

    @override
    def share(
        self, clients: Sequence[int], groups: Sequence[Group], *, weights: Weights = "uniform"
    ) -> None:
        self._count_sharing(clients, groups)

    @override
    def collect(self, mine: Mapping[int, T]) -> dict[int, T]:
        self.depends = True
        return dict(mine)

    @override
    def tally(self, name: str, values: Iterable[Tensor]) -> None:
        """Of sessions, of which there are none."""
