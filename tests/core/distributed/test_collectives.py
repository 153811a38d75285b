"""What ranks give each other, and what that is on the wire."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightfed.distributed import watch
from lightfed.distributed.collectives import PACKAGE_BYTES, Ranks
from tests.core.distributed.threads import on_ranks


def part(sender: int, receiver: int, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return 100 * sender + 10 * receiver + torch.arange(size, dtype=dtype)


@given(
    sizes=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3),
    dtype=st.sampled_from([torch.int32, torch.float64]),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_every_rank_gets_what_the_others_have_for_it(
    sizes: list[list[int]], dtype: torch.dtype
) -> None:
    """sizes[s][r]: elements from rank s to rank r; any of them may be 0."""

    def work(ranks: Ranks) -> tuple[list[Tensor], bool, float]:
        parts = [part(ranks.rank, r, sizes[ranks.rank][r], dtype) for r in range(3)]
        found = ranks.swap(parts, [sizes[s][ranks.rank] for s in range(3)])
        return found, found[ranks.rank] is parts[ranks.rank], ranks.take_wire_bytes()

    for rank, (found, own, sent) in enumerate(on_ranks(3, work)):
        assert len(found) == 3
        assert own
        for sender in range(3):
            assert torch.equal(found[sender], part(sender, rank, sizes[sender][rank], dtype))
        assert sent == dtype.itemsize * sum(sizes[rank][r] for r in range(3) if r != rank)


def test_ranks_on_a_gpu_that_talk_over_gloo_go_through_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the process group gets is in pinned memory, and what comes finds its way back."""
    made, pinned = torch.empty, list[bool]()

    def empty(*shape: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        pinned.append(pin_memory)
        return made(*shape, **more)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "is_pinned", lambda *_: True)

    def work(ranks: Ranks) -> tuple[Tensor, Tensor, list[Tensor]]:
        ranks.staged, ranks.device = True, torch.device("cuda", 0)
        total, most = torch.tensor([1.0, ranks.rank]), torch.tensor([ranks.rank, 7])
        assert ranks.sum_(total) is total
        assert ranks.max_(most) is most
        parts = [part(ranks.rank, r, 2) for r in range(2)]
        return total, most, ranks.swap(parts, [2, 2])

    for rank, (total, most, found) in enumerate(on_ranks(2, work)):
        assert total.tolist() == [2.0, 1.0]
        assert most.tolist() == [1, 7]
        assert [f.tolist() for f in found] == [part(s, rank, 2).tolist() for s in range(2)]
    # Of each rank: a sum, a maximum, and what it sends and gets in an exchange.
    assert sum(pinned) == 2 * 4


class Says:
    """Tells its rank, and keeps what it hears."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def outgoing(self) -> int:
        return 10 * self.rank

    def receive(self, said: list[int]) -> None:
        self.said = said


@pytest.mark.parametrize("size", [1, PACKAGE_BYTES, 3 * PACKAGE_BYTES])
def test_objects_of_any_size_are_gathered_in_order_with_what_is_noticed(size: int) -> None:
    """Those of one rank are long."""

    def work(ranks: Ranks) -> tuple[list[Any], list[int]]:
        says = ranks.messages = Says(ranks.rank)
        found = ranks.gather([ranks.rank] * ranks.rank + ["x" * size] * (ranks.rank == 1))
        return found, says.said

    assert on_ranks(3, work) == [([1, "x" * size, 2, 2], [0, 10, 20])] * 3


def test_one_rank_hears_itself_and_meets_nobody() -> None:
    ranks = Ranks(torch.device("cpu"))
    ranks.barrier()
    assert ranks.any(True)
    assert not ranks.any(False)
    ranks.messages = says = Says(1)
    assert ranks.gather(["x"]) == ["x"]
    assert says.said == [10]
    assert ranks.for_thread().messages is None


def test_a_broken_collective_is_handed_to_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(watch, "lost", lambda *stated: done.append(stated))
    error = RuntimeError("Connection closed by peer")
    ranks = Ranks(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="closed"), ranks.collective("a merge"):
        raise error
    assert done == [("a merge", error)]
    with pytest.raises(ValueError, match="mine"), ranks.collective("a merge"):
        raise ValueError("mine")
    assert len(done) == 1
