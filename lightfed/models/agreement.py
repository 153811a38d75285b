"""Whether all ranks have built the same network, and whether it can be built again."""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightfed.utils.errors import UserError
from lightfed.utils.tensor_parts import bytes_of, held_bytes, kind, parts

log = logging.getLogger(__name__)

# A network of more bytes is not built a second time.
_LARGEST_REBUILT = 1 << 30

# A tensor's name, shape and type, and whether it is trained.
_Form = tuple[str, tuple[int, ...], str, bool]


class Gathers(Protocol):
    """The part of `Ranks` that is needed here."""

    rank: int
    world: int

    def gather(self, objects: list[Any], what: str = ...) -> list[Any]: ...
    def broadcast(self, obj: Any) -> Any: ...


def agree(module: nn.Module, ranks: Gathers, *, key: str) -> bool:
    """Make a module the same on all ranks. If start values differ, those of rank 0 hold.

    Args:
        module: This rank's module, which is changed in place.
        ranks: The ranks.
        key: The key of the network, for errors.

    Returns:
        Whether it was the same on all ranks already.

    Raises:
        UserError: If the ranks have other tensors, or in another order. It names the first.
    """
    forms = _forms(module)
    digests = (_digest([repr(forms).encode()]), _digest_of_values(module))
    digests_of_ranks = ranks.gather([digests], "the start of the clients' networks")

    # Every rank comes to the same conclusions here, so that all take part in what follows.
    if len({form for form, _ in digests_of_ranks}) > 1:
        _refuse(ranks.gather([forms]), key)
    if len({values for _, values in digests_of_ranks}) == 1:
        return True

    # As in torch's DDP.
    tensors = [part for tensor in _tensors(module).values() for part in parts(tensor).values()]
    values = ranks.broadcast([tensor.detach().cpu() for tensor in tensors])
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
    return False


def is_small(module: nn.Module) -> bool:
    """Return whether a network may be built twice, only to see whether it is the same."""
    return sum(map(held_bytes, _tensors(module).values())) <= _LARGEST_REBUILT


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules have the same tensors, with the same values."""
    return _forms(one) == _forms(other) and _digest_of_values(one) == _digest_of_values(other)


def warn_of_draws(name: str, *, ranks: bool) -> None:
    """Warn that a group's network is drawn anew in every run.

    Args:
        name: The name of the group.
        ranks: Whether it was found by a comparison of ranks; otherwise it was built twice.
    """
    where = "on every rank, and rank 0's are used" if ranks else "whenever it is built"
    log.warning(
        "group %s: its network has different initial values %s, so this run cannot be repeated; "
        "draw them from the default generators of torch, numpy or Python, or from one with a seed",
        name,
        where,
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _forms(module: nn.Module) -> list[_Form]:
    """Return the forms of all tensors, in order."""
    return [
        (name, tuple(tensor.shape), kind(tensor), tensor.requires_grad)
        for name, tensor in _tensors(module).items()
    ]


def _refuse(forms_of_ranks: Sequence[list[_Form]], key: str) -> None:
    """Name the first tensor in which two ranks differ.

    Raises:
        UserError: Always, if two ranks differ.
    """
    first_forms = forms_of_ranks[0]
    for rank, forms in enumerate(forms_of_ranks):
        for position in range(max(len(first_forms), len(forms))):
            expected = _described(first_forms, position)
            present = _described(forms, position)
            if expected != present:
                raise UserError(
                    key=key,
                    found=f"rank 0 has {expected} where rank {rank} has {present}",
                    fix="build the same layers in the same order on all ranks; a set has no order",
                )


def _described(forms: list[_Form], position: int) -> str:
    """Return the form at a position in words."""
    if position >= len(forms):
        return "nothing"
    name, shape, dtype, is_trained = forms[position]
    text = f"{name} {shape} {dtype}"
    return text if is_trained else f"{text}, not trained"


def _digest_of_values(module: nn.Module) -> str:
    """Return a digest of the values of all tensors."""
    contents = []
    for tensor in _tensors(module).values():
        contents += [bytes_of(part) for part in parts(tensor).values()]
    return _digest(contents)


def _digest(contents: Sequence[Any]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for content in contents:
        state.update(content)
    return state.hexdigest()
