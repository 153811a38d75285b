"""Logits of labels that a client does not hold, set to zero (HeteroFL, section 3.3)."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightfed.api.algorithm import require_argument
from lightfed.local.client_module import NetworkClient

_BUFFER = "absent_labels"


class LogitMasks:
    """Forward hooks that set the logits of labels outside a client's data to zero.

    Zero and not minus infinity: absent classes still add exp(0) to the softmax denominator, but get
    no gradient. Which labels are absent lies in a buffer of the module, `absent_labels` (C,).
    """

    def __init__(self) -> None:
        self._hooks: dict[int, _Mask] = {}

    def attach(self, module: L.LightningModule, num_classes: int) -> None:
        """Hook a NetworkClient's network, or a user's module, whose steps call `self(x)`."""
        absent = torch.zeros(num_classes, dtype=torch.bool, device=module.device)
        module.register_buffer(_BUFFER, absent, persistent=False)
        network = module.net if isinstance(module, NetworkClient) else module
        self._hooks[id(module)] = mask = _Mask(module)
        network.register_forward_hook(mask)

    def check(self, module: L.LightningModule) -> None:
        """Reject a module whose masked session never called the hook; a UserError names it."""
        called = self._hooks[id(module)].called or not module.get_buffer(_BUFFER).any()
        found = f"true, but the training_step of {type(module).__name__} does not call self(x)"
        require_argument(called, "mask", found, "call it there, or set mask: false")

    @staticmethod
    def absent(labels: Sequence[Tensor], num_classes: int) -> dict[str, Tensor]:
        """The buffer of K clients, (K, C) by name, from the labels that each holds."""
        absent = torch.ones(len(labels), num_classes, dtype=torch.bool)
        for row, held in zip(absent, labels, strict=True):
            row[held] = False
        return {_BUFFER: absent}

    def hold(self, module: L.LightningModule, labels: Tensor | None) -> None:
        """Set the labels that the module's current client holds; None for all."""
        buffer = module.get_buffer(_BUFFER)
        absent = torch.full((len(buffer),), labels is not None)
        if labels is not None:
            absent[labels] = False
        buffer.copy_(absent)


class _Mask:
    """The hook of one module, and whether it has run.

    If `stacked`, it takes the logits of several clients at once, (K, B, C), with a buffer (K, C).
    """

    stacked = True

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self.called = False

    def __call__(self, network: torch.nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        self.called = True
        absent: Tensor = self._module.absent_labels  # type: ignore[assignment]
        shape = (*absent.shape[:-1], *[1] * (logits.dim() - absent.dim()), absent.shape[-1])
        return logits.masked_fill(absent.view(shape), 0.0)
