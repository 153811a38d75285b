"""Logits of labels that a client does not hold, set to zero (HeteroFL, section 3.3)."""

from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightfed.local.client_module import NetworkClient
from lightfed.utils.errors import UserError


class LogitMasks:
    """Forward hooks that set the logits of labels outside a client's data to zero.

    Zero and not minus infinity: absent classes still add exp(0) to the softmax denominator, but get
    no gradient.
    """

    def __init__(self) -> None:
        self._absent: dict[int, Tensor | None] = {}
        self._filled: set[int] = set()  # modules whose masks have been used

    def attach(self, module: L.LightningModule) -> None:
        """Hook a NetworkClient's network, or a user's module, whose steps call `self(x)`."""
        network = module.net if isinstance(module, NetworkClient) else module
        network.register_forward_hook(partial(self._fill, module))

    def check(self, module: L.LightningModule) -> None:
        """Reject a module whose masked session never called the hook.

        Raises:
            UserError: naming the module.
        """
        if self._absent.get(id(module)) is not None and id(module) not in self._filled:
            found = f"true, but the training_step of {type(module).__name__} does not call self(x)"
            fix = "call it there, or set mask: false"
            raise UserError("model.algorithm.init_args.mask", found, fix)

    def hold(
        self,
        module: L.LightningModule,
        labels: Tensor | None,
        num_classes: int,
        device: torch.device,
    ) -> None:
        """Which labels the module's current client holds; None for all."""
        if labels is None or len(labels) == num_classes:
            self._absent[id(module)] = None
            return
        absent = torch.ones(num_classes, dtype=torch.bool)
        absent[labels] = False
        self._absent[id(module)] = absent.to(device)

    def _fill(
        self, module: L.LightningModule, network: torch.nn.Module, inputs: Any, logits: Tensor
    ) -> Tensor:
        absent = self._absent.get(id(module))
        if absent is None:
            return logits
        self._filled.add(id(module))
        return logits.masked_fill(absent, 0.0)
