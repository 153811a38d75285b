"""What ranks give each other, and how many bytes they send."""

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
    """`sizes[s][r]` elements go from rank s to rank r; any of them can be 0."""

    def work(ranks: Ranks) -> tuple[list[Tensor], bool, float]:
        sizes_to_others = sizes[ranks.rank]
        sizes_from_others = [sizes[sender][ranks.rank] for sender in range(3)]
        parts = [
            part(ranks.rank, receiver, sizes_to_others[receiver], dtype) for receiver in range(3)
        ]
        received = ranks.swap(parts, sizes_from_others)
        own_is_not_copied = received[ranks.rank] is parts[ranks.rank]
        return received, own_is_not_copied, ranks.take_wire_bytes()

    for rank, (received, own_is_not_copied, sent_bytes) in enumerate(on_ranks(3, work)):
        assert own_is_not_copied
        assert len(received) == 3
        for sender in range(3):
            assert torch.equal(received[sender], part(sender, rank, sizes[sender][rank], dtype))

        sent_elements = sum(sizes[rank]) - sizes[rank][rank]
        assert sent_bytes == dtype.itemsize * sent_elements


def test_ranks_on_a_gpu_that_talk_over_gloo_go_through_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the process group gets is in pinned memory, and what comes back is where it belongs."""
    torch_empty = torch.empty
    pinned: list[bool] = []

    def empty(*shape: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        # Memory cannot be pinned without a GPU.
        pinned.append(pin_memory)
        return torch_empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "is_pinned", lambda *_: True)

    def work(ranks: Ranks) -> tuple[Tensor, Tensor, list[Tensor]]:
        ranks.staged = True
        ranks.device = torch.device("cuda", 0)
        total = torch.tensor([1.0, ranks.rank])
        largest = torch.tensor([ranks.rank, 7])
        assert ranks.sum_(total) is total
        assert ranks.max_(largest) is largest

        parts = [part(ranks.rank, receiver, 2) for receiver in range(2)]
        return total, largest, ranks.swap(parts, [2, 2])

    for rank, (total, largest, received) in enumerate(on_ranks(2, work)):
        assert total.tolist() == [2.0, 1.0]
        assert largest.tolist() == [1, 7]
        for sender in range(2):
            assert received[sender].tolist() == part(sender, rank, 2).tolist()

    # Each rank has a sum, a maximum, and what it sends and receives in an exchange.
    assert sum(pinned) == 2 * 4


class Messages:
    """Sends a number of its rank, and keeps what it receives."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.received: list[int] = []

    def outgoing(self) -> int:
        return 10 * self.rank

    def receive(self, messages: list[int]) -> None:
        self.received = messages


@pytest.mark.parametrize("size", [1, PACKAGE_BYTES, 3 * PACKAGE_BYTES])
def test_objects_of_any_size_are_gathered_in_order_with_the_messages(size: int) -> None:
    """The objects of rank 1 are long."""
    objects_of_rank: list[list[Any]] = [[], [1, "x" * size], [2, 2]]

    def work(ranks: Ranks) -> tuple[list[Any], list[int]]:
        messages = Messages(ranks.rank)
        ranks.messages = messages
        objects = ranks.gather(objects_of_rank[ranks.rank])
        return objects, messages.received

    for objects, messages in on_ranks(3, work):
        assert objects == [1, "x" * size, 2, 2]
        assert messages == [0, 10, 20]


def test_a_single_rank_takes_the_same_path_without_communication() -> None:
    ranks = Ranks(torch.device("cpu"))
    ranks.barrier()
    assert ranks.any(True)
    assert not ranks.any(False)

    messages = Messages(1)
    ranks.messages = messages
    assert ranks.gather(["x"]) == ["x"]
    assert messages.received == [10]
    assert ranks.for_thread().messages is None


def test_a_broken_collective_is_handed_to_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(watch, "lost", lambda *arguments: calls.append(arguments))
    ranks = Ranks(torch.device("cpu"))

    error = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError, match="closed"), ranks.collective("a merge"):
        raise error
    assert calls == [("a merge", error)]

    # An error of another kind is not about the connection.
    with pytest.raises(ValueError, match="mine"), ranks.collective("a merge"):
        raise ValueError("mine")
    assert len(calls) == 1
