"""Calls of a module with other tensors than its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightfed.models.split import evaluating


class Substitution:
    """Calls a module in evaluation mode, with other tensors in the place of some of its own.

    It is `torch.func.functional_call` without what that looks up in every call: where the tensors
    lie, and which parts the module has. So make a new one after the module has got other layers.
    It works under `torch.func.vmap`, too.

    Args:
        module: The module.
        names: Names of the parameters and buffers that are substituted. A parameter of several
            names is substituted in all places.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module = module

        # Where each tensor lies: its position among the names, the dictionary that holds it, and
        # its key there.
        self._homes: list[tuple[int, dict[str, Any], str]] = []
        positions: dict[int, int] = {}
        for position, name in enumerate(names):
            path, _, key = name.rpartition(".")
            owner = module.get_submodule(path)
            tensor = owner._buffers[key] if key in owner._buffers else owner._parameters[key]
            positions[id(tensor)] = position
        for part in module.modules():
            registers: list[dict[str, Any]] = [part._parameters, part._buffers]
            for register in registers:
                for key, tensor in register.items():
                    if tensor is not None and id(tensor) in positions:
                        self._homes.append((positions[id(tensor)], register, key))

        # The attributes of every part, if a part only notes its mode. Otherwise `train` is called.
        parts = list(module.modules())
        self._attributes: list[dict[str, Any]] | None = None
        if all(_only_notes_its_mode(part) for part in parts):
            self._attributes = [vars(part) for part in parts]

    @torch.no_grad()
    def outputs(self, models: Sequence[Sequence[Tensor]], x: Tensor) -> list[Tensor]:
        """Return what the module gives for x with the tensors of each model.

        Args:
            models: Tensors in the order of the names.
            x: The module's input.
        """
        homes = self._homes
        originals = [register[key] for _, register, key in homes]
        outputs = []
        with self._in_evaluation_mode():
            try:
                for tensors in models:
                    for position, register, key in homes:
                        register[key] = tensors[position]
                    outputs.append(self._module(x))
            finally:
                for (_, register, key), original in zip(homes, originals, strict=True):
                    register[key] = original
        return outputs

    @contextmanager
    def _in_evaluation_mode(self) -> Iterator[None]:
        if self._attributes is None:
            with evaluating(self._module):
                yield
            return

        modes = [attributes["training"] for attributes in self._attributes]
        try:
            for attributes in self._attributes:
                attributes["training"] = False
            yield
        finally:
            for attributes, mode in zip(self._attributes, modes, strict=True):
                attributes["training"] = mode


def _only_notes_its_mode(part: nn.Module) -> bool:
    """Return whether `train` of a part is that of every module."""
    return type(part).train is nn.Module.train and "train" not in vars(part)
