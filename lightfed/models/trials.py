"""Calls of a user's module that are only a check: they leave no trace in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightfed.utils.rng import seeded

M = TypeVar("M", bound=nn.Module)


@contextmanager
def on_trial(module: M, device: torch.device | None = None) -> Iterator[M]:
    """A copy of a module to call in a check: what a call writes, draws or counts is forgotten.

    Frozen parameters are shared with the copy: they may be large. A module that cannot be copied is
    given itself, and put back as far as its tensors, gradients, modes and attributes go.
    """
    with seeded(0, device):
        copy = _copy_or_none(module)
        if copy is not None:
            yield copy
            return
        before = _Trace(module)
        try:
            yield module
        finally:
            before.put_back()


def _copy_or_none(module: M) -> M | None:
    try:
        return trial_copy(module)
    except Exception:  # of a user's module
        return None


def trial_copy(module: M) -> M:
    """A deep copy of a module that shares its frozen parameters and its Trainer."""
    memo: dict[int, Any] = {id(p): p for p in module.parameters() if not p.requires_grad}
    copy = deepcopy(module, memo)
    # Lightning leaves the Trainer out of what is copied, also in modules within the module.
    for original, twin in zip(module.modules(), copy.modules(), strict=True):
        trainer = vars(original).get("_trainer")
        if trainer is not None:
            vars(twin)["_trainer"] = trainer
    for part in copy.modules():
        for name, p in part._parameters.items():
            if p is not None and not isinstance(p, nn.Parameter):
                # Copies of other classes of tensors may be no parameters.
                part._parameters[name] = nn.Parameter(p.detach(), p.requires_grad)
    return copy


class _Trace:
    """What a module holds, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(part, dict(vars(part)), _entries(part)) for part in module.modules()]
        tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._tensors = [(t, t.data, t.data.clone(), t.grad) for t in tensors]

    def put_back(self) -> None:
        for part, attributes, entries in self._parts:
            held = vars(part)
            held.clear()
            held.update(attributes)
            for name, entry in entries.items():
                held[name].clear()
                held[name].update(entry)
        for tensor, place, values, grad in self._tensors:
            tensor.data = place.copy_(values)
            tensor.grad = grad


def _entries(part: nn.Module) -> dict[str, dict[str, Tensor | nn.Module | None]]:
    """The tables of a module's parameters, buffers and layers."""
    return {name: dict(vars(part)[name]) for name in ("_parameters", "_buffers", "_modules")}
