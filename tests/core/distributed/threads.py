"""Ranks as threads: collectives as in `distributed`, with lists and a barrier for a network."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from lightfed.distributed import collectives
from lightfed.distributed.collectives import Ranks
from lightfed.utils.stopwatch import Timings

T = TypeVar("T")


class Network:
    """What torch.distributed does, between threads of one process."""

    class ReduceOp:
        SUM, MAX = "sum", "max"

    def __init__(self, world: int) -> None:
        self.world = world
        self.rank = threading.local()
        self._box: list[Any] = [None] * world
        self._barrier = threading.Barrier(world)

    def _share(self, given: Any) -> list[Any]:
        self._box[self.rank.value] = given
        self._barrier.wait(timeout=60)
        every = list(self._box)
        self._barrier.wait(timeout=60)
        return every

    def all_reduce(self, tensor: Tensor, op: str, group: None) -> None:
        every = torch.stack(self._share(tensor.clone()))
        tensor.copy_(every.sum(0) if op == "sum" else every.amax(0))

    def all_gather(self, out: list[Tensor], given: Tensor, group: None = None) -> None:
        for part, theirs in zip(out, self._share(given.clone()), strict=True):
            part.copy_(theirs)

    def all_to_all_single(
        self, out: Tensor, given: Tensor, coming: list[int], sent: list[int], group: None
    ) -> None:
        assert given.numel() == sum(sent)
        every = self._share([part.clone() for part in given.split(sent)])
        out.copy_(torch.cat([parts[self.rank.value] for parts in every]))
        assert [len(parts[self.rank.value]) for parts in every] == coming


def on_ranks(world: int, work: Callable[[Ranks], T]) -> list[T]:
    """The results of `work` on every rank."""
    network = Network(world)
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        network.rank.value = rank
        ranks = Ranks.__new__(Ranks)
        ranks.device, ranks.rank, ranks.world = torch.device("cpu"), rank, world
        ranks.side, ranks.staged, ranks.wire_bytes = None, False, 0.0
        ranks.timings = Timings()
        try:
            results[rank] = work(ranks)
        except BaseException as error:
            errors.append(error)
            network._barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "dist", network)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
