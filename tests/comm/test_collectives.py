"""What ranks give each other, and what that is on the wire."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightfed.comm.collectives import Ranks
from tests.core.threads import on_ranks


def part(sender: int, receiver: int, size: int) -> Tensor:
    return 100 * sender + 10 * receiver + torch.arange(size, dtype=torch.int32)


@given(sizes=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_every_rank_gets_what_the_others_have_for_it(sizes: list[list[int]]) -> None:
    """sizes[s][r]: elements from rank s to rank r; any of them may be 0."""

    def work(ranks: Ranks) -> tuple[list[Tensor], bool, float]:
        parts = [part(ranks.rank, r, sizes[ranks.rank][r]) for r in range(3)]
        found = ranks.swap(parts, [sizes[s][ranks.rank] for s in range(3)])
        return found, found[ranks.rank] is parts[ranks.rank], ranks.take_wire_bytes()

    for rank, (found, own, sent) in enumerate(on_ranks(3, work)):
        assert len(found) == 3
        assert own
        for sender in range(3):
            assert torch.equal(found[sender], part(sender, rank, sizes[sender][rank]))
        assert sent == 4 * sum(sizes[rank][r] for r in range(3) if r != rank)


def test_bytes_are_those_of_the_type() -> None:
    def work(ranks: Ranks) -> float:
        other = 1 - ranks.rank
        parts = [torch.zeros(0, dtype=torch.float64)] * 2
        parts[other] = torch.ones(3 if ranks.rank else 5, dtype=torch.float64)
        ranks.swap(parts, [0, 3] if ranks.rank == 0 else [5, 0])
        return ranks.take_wire_bytes()

    assert on_ranks(2, work) == [40, 24]


def test_one_rank_keeps_its_part() -> None:
    ranks, mine = Ranks(torch.device("cpu")), torch.arange(3)
    (found,) = ranks.swap([mine], [3])
    assert found is mine
    assert ranks.take_wire_bytes() == 0
