"""Whether all ranks have built the same network, and a second building gives it again."""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)

_BYTES = 1 << 30  # of a network; a larger one is not built a second time


class Gathers(Protocol):
    """The part of `Ranks` that is needed here."""

    rank: int
    world: int

    def gather(self, objects: list[Any], what: str = ...) -> list[Any]: ...
    def broadcast(self, obj: Any) -> Any: ...


def agree(module: nn.Module, ranks: Gathers, *, key: str) -> bool:
    """Make a module the same on all ranks; whether it was.

    Unlike start values become those of rank 0, as in torch's DDP.

    Raises:
        UserError: the ranks have other tensors, or in another order; it names the first.
    """
    forms = _forms(module)
    own = _digest([repr(forms).encode()]), _digest_of_values(module)
    every = ranks.gather([own], "the start of the clients' networks")
    if len({form for form, _ in every}) > 1:
        _refuse(ranks.gather([forms]), key)
    if len({values for _, values in every}) == 1:
        return True
    tensors = _tensors(module)
    values = ranks.broadcast({name: t.detach().cpu() for name, t in tensors.items()})
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
    return False


def is_small(module: nn.Module) -> bool:
    """Whether a network may be built twice."""
    return sum(tensor.nbytes for tensor in _tensors(module).values()) <= _BYTES


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same tensors, with the same values."""
    return _forms(one) == _forms(other) and _digest_of_values(one) == _digest_of_values(other)


def warn_of_draws(name: str, *, ranks: bool) -> None:
    """Say that a group's network is drawn anew in every run."""
    where = "on every rank, and those of rank 0 hold" if ranks else "whenever it is built"
    log.warning(
        "group %s: its network has other start values %s: this run cannot be repeated; draw them "
        "from the default generators of torch, numpy or Python, or from one with a seed",
        name, where,
    )  # fmt: skip


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _forms(module: nn.Module) -> list[tuple[str, tuple[int, ...], str, bool]]:
    """The tensors in order: name, shape, type, and whether it is trained."""
    return [
        (name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
        for name, t in _tensors(module).items()
    ]


def _refuse(every: Sequence[Any], key: str) -> None:
    """Name the first tensor in which two ranks differ.

    `every` are the lists of `_forms` of all ranks, in order.
    """
    first = every[0]
    for rank, forms in enumerate(every):
        for place in range(max(len(first), len(forms))):
            one, other = (
                _described(own[place]) if place < len(own) else "nothing" for own in (first, forms)
            )
            if one != other:
                found = f"rank 0 has {one} where rank {rank} has {other}"
                fix = "build the same layers in the same order on all ranks; a set has no order"
                raise UserError(key, found, fix)


def _described(form: tuple[str, tuple[int, ...], str, bool]) -> str:
    name, shape, dtype, trained = form
    return f"{name} {shape} {dtype}{'' if trained else ', not trained'}"


def _digest_of_values(module: nn.Module) -> str:
    parts = []
    for tensor in _tensors(module).values():
        values = tensor.detach().cpu().contiguous().flatten()
        parts.append(values.view(torch.uint8).numpy().data)
    return _digest(parts)


def _digest(parts: Sequence[Any]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()
