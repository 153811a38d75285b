"""Which ranks share a GPU: NCCL refuses two on one, in its first collective and in many lines."""

import socket
from collections.abc import Sequence
from typing import Any

import torch


def card_of(device: torch.device) -> str:
    """Return a name of a GPU that is the same in all processes, whatever number they know it by.

    It is empty for the CPU.
    """
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return str(uuid) if uuid else f"{socket.gethostname()} {device}"


def exchange(store: Any, card: str, *, rank: int, world: int) -> list[str]:
    """Return the GPU of every rank, in order; every rank calls it and waits for the others.

    Args:
        store: A store that all ranks have joined.
        card: The GPU of this rank, as `card_of` names it.
        rank: The number of this rank.
        world: The number of ranks.

    Raises:
        DistStoreError: A rank does not come.
    """
    store.set(f"lightfed/card/{rank}", card)
    return [store.get(f"lightfed/card/{other}").decode() for other in range(world)]


def sharing(cards: Sequence[str]) -> list[int]:
    """Return the ranks on the first GPU that several of them have; none if each has its own.

    Args:
        cards: The GPU of every rank, in order; empty for the CPU, which ranks may share.
    """
    for card in cards:
        ranks = [rank for rank, other_card in enumerate(cards) if other_card == card]
        if card and len(ranks) > 1:
            return ranks
    return []
