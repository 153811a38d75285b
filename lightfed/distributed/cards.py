"""Which ranks share a GPU: NCCL refuses two on one, in its first collective and in many lines."""

import socket
from collections.abc import Sequence
from typing import Any

import torch


def card_of(device: torch.device) -> str:
    """A name of the GPU that is the same in all processes, whatever number they know it by.

    Empty for the CPU.
    """
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", None) or f"{socket.gethostname()} {device}")


def exchange(store: Any, card: str, *, rank: int, world: int) -> list[str]:
    """The GPU of every rank, by a store that all have joined; it waits for those of others.

    Raises:
        DistStoreError: a rank does not come.
    """
    store.set(f"lightfed/card/{rank}", card)
    return [store.get(f"lightfed/card/{other}").decode() for other in range(world)]


def sharing(cards: Sequence[str]) -> list[int]:
    """The ranks on the first GPU that several have; none if every rank has its own."""
    for card in cards:
        ranks = [rank for rank, other in enumerate(cards) if other == card]
        if card and len(ranks) > 1:
            return ranks
    return []
