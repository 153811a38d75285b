"""Ranks find out that they share a GPU before NCCL refuses them."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightfed.distributed.cards import card_of, exchange, sharing


@pytest.mark.parametrize(
    ("cards", "ranks"),
    [
        (["a", "b"], []),
        (["a", "a"], [0, 1]),
        (["a", "b", "c", "b"], [1, 3]),
        (["", ""], []),  # of CPUs
    ],
)
def test_all_ranks_learn_who_shares_a_gpu(cards: list[str], ranks: list[int]) -> None:
    store = dist.HashStore()

    def meet(rank: int) -> list[str]:
        return exchange(store, cards[rank], rank=rank, world=len(cards))

    with ThreadPoolExecutor(len(cards)) as threads:
        found = list(threads.map(meet, range(len(cards))))
    assert found == [cards] * len(cards)
    assert sharing(found[0]) == ranks


def test_a_gpu_has_one_name_whatever_its_number_in_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def properties(device: Any) -> SimpleNamespace:
        return SimpleNamespace(uuid="GPU-5f")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert card_of(torch.device("cuda", 0)) == card_of(torch.device("cuda", 3)) == "GPU-5f"
    assert card_of(torch.device("cpu")) == ""
