"""What is refused where some clients never take part (`data.unseen`)."""

from collections.abc import Sequence
from typing import Any

from lightfed.local.hooks import Hooks
from lightfed.utils.errors import UserError

_KEY = "data.unseen"
_FIX = "leave it out, or choose a method with a server, such as FedAvg or FedPer"


def check_takes_unseen(algorithm: Hooks) -> None:
    """Refuse a method that says why it can have no unseen clients."""
    if algorithm.no_unseen:
        raise UserError(_KEY, f"given, and {algorithm.no_unseen}", _FIX)


def check_has_for_unseen(fed: Any) -> None:
    """Refuse a method that has no model for a client that it has never met.

    Args:
        fed: The fleet, after the `setup` of the method.
    """
    if fed.algorithm.newcomers(fed, fed.unseen[:1]) is None:
        name = type(fed.algorithm).__name__
        raise UserError(_KEY, f"given, and {name} has nothing for a client it has never met", _FIX)


def refuse_unseen(algorithm: Hooks, unseen: Sequence[int], clients: Sequence[int]) -> None:
    """Refuse a round in which an unseen client would take part."""
    wrong = sorted(set(clients).intersection(unseen))
    if wrong:
        name = type(algorithm).__name__
        found = f"client {wrong[0]} is unseen, and {name} sends to it or trains it"
        raise UserError(_KEY, found, "choose a method that asks fed.participants whom to train")
