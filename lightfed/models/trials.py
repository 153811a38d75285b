"""Calls of a user's module that are only a check: they leave no trace in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightfed.utils.rng import seeded

M = TypeVar("M", bound=nn.Module)

# The registers of a module. Their contents may change, so a copy of its attributes is not enough.
_REGISTERS = ("_parameters", "_buffers", "_modules")


@contextmanager
def on_trial(module: M, device: torch.device | None = None) -> Iterator[M]:
    """Give a copy of a module to call in a check: what a call writes, draws or counts is forgotten.

    Frozen parameters are shared with the copy: they may be large. A module that cannot be copied is
    given itself, and put back as far as its tensors, gradients, modes and attributes go.

    Args:
        module: The module.
        device: A device whose random state is to be kept as well.
    """
    with seeded(0, device):
        copy = _copy_or_none(module)
        if copy is not None:
            yield copy
            return

        trace = _Trace(module)
        try:
            yield module
        finally:
            trace.put_back()


def _copy_or_none(module: M) -> M | None:
    try:
        return trial_copy(module)
    except Exception:  # of a user's module
        return None


def trial_copy(module: M) -> M:
    """Return a deep copy of a module that shares its frozen parameters and its Trainer."""
    # deepcopy takes what its memo has as it is.
    memo: dict[int, Any] = {id(p): p for p in module.parameters() if not p.requires_grad}
    copy = deepcopy(module, memo)

    # Lightning leaves the Trainer out of what is copied, also in modules within the module.
    for original, copied in zip(module.modules(), copy.modules(), strict=True):
        trainer = vars(original).get("_trainer")
        if trainer is not None:
            vars(copied)["_trainer"] = trainer

    # Copies of other classes of tensors may be no parameters.
    for submodule in copy.modules():
        for name, p in submodule._parameters.items():
            if p is not None and not isinstance(p, nn.Parameter):
                submodule._parameters[name] = nn.Parameter(p.detach(), p.requires_grad)
    return copy


class _Trace:
    """What a module holds, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self._submodules = [
            (submodule, dict(vars(submodule)), _contents_of_registers(submodule))
            for submodule in module.modules()
        ]
        tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._tensors = [
            (tensor, tensor.data, tensor.data.clone(), tensor.grad) for tensor in tensors
        ]

    def put_back(self) -> None:
        """Make the module as it was: first what it refers to, then the values of its tensors."""
        for submodule, attributes, registers in self._submodules:
            present = vars(submodule)
            present.clear()
            present.update(attributes)
            for name, contents in registers.items():
                present[name].clear()
                present[name].update(contents)

        for tensor, memory, values, gradient in self._tensors:
            tensor.data = memory.copy_(values)
            tensor.grad = gradient


def _contents_of_registers(module: nn.Module) -> dict[str, dict[str, Tensor | nn.Module | None]]:
    """Return copies of a module's registers of parameters, buffers and layers."""
    return {name: dict(vars(module)[name]) for name in _REGISTERS}
