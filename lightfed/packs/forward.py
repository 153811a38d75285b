"""The forward and backward pass of a pack: K clients in one module, on a batch of each."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.local.logbook import check_mean
from lightfed.local.optimizer import run_backward
from lightfed.local.session import Autocast
from lightfed.models.labelled import UNLABELLED
from lightfed.packs import stacked
from lightfed.packs.known_layers import is_cross_entropy
from lightfed.packs.stacked import Views
from lightfed.state.rows import ModelLayout


class PackForward:
    """Computes the losses of K clients on a batch of each, and the gradients of these losses.

    Args:
        module: The module of the group. If its loss is the cross-entropy of its network
            (`is_cross_entropy`), it is computed here; of any other module `training_step` is
            called.
        layout: The layout of the clients' rows.
        context: Autocast of the Trainer's precision; None in full precision.
        known: Whether all layers are known by their types.

    Attributes:
        trained: Names of the parameters that are trained, in the order of the layout.
        buffers: Names of the module's buffers.
        epoch_batches: Number of batches in a local epoch. `training_step` gets the number of its
            batch within the epoch, or within the session if this is 0.
    """

    epoch_batches = 0

    def __init__(
        self,
        module: L.LightningModule,
        layout: ModelLayout,
        context: Autocast | None,
        *,
        known: bool = False,
    ) -> None:
        self._module = module
        self._training_step = _TrainingStep(module)
        self._is_cross_entropy = is_cross_entropy(module)
        self._known = known
        self._context: Autocast = context or nullcontext
        self._ones = torch.empty(0)  # (K,) the gradient of the losses

        requires_grad = {name for name, p in module.named_parameters() if p.requires_grad}
        self.trained = [entry.name for entry in layout.floats if entry.name in requires_grad]
        self.buffers = [name for name, _ in module.named_buffers()]

    def __call__(
        self,
        values: Views,
        shared: Views,
        leaves: Sequence[Tensor],
        batch: tuple[Tensor, Tensor],
        index: int,
        sizes: Tensor | None = None,
        randomness: str = "different",
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None]]:
        """Run one batch of each client.

        Args:
            values: Parameters and buffers by name, each of shape (K, *shape). A buffer that the
                module replaces is replaced here.
            shared: Buffers that are the same for all clients, by name.
            leaves: The tensors among the values to differentiate by.
            batch: Inputs and labels, each of shape (K, B, ...).
            index: Number of the batch in its session.
            sizes: Number of samples of each client, of shape (K,), if these differ. The rows of
                the batch beyond them have no weight. Only for modules whose loss is known: a
                `training_step` gets them with the label `UNLABELLED`.
            randomness: As in `torch.func.vmap`.

        Returns:
            The losses, of shape (K,); what the module logged, by name, of shape (K,) each; and the
            gradients of the leaves, None for a leaf that is not part of the loss.
        """
        if index == 0:
            # A callback may have changed layers since the last session.
            self._places = self._find_places([*values, *shared])

        with self._context():
            if self._is_cross_entropy:
                logits = stacked.forward(
                    self._module,
                    values,
                    batch[0],
                    shared=shared,
                    places=self._places,
                    randomness=randomness,
                    sizes=sizes,
                )
                losses = _cross_entropies(logits, batch[1], sizes)
                logged: dict[str, Tensor] = {}
            else:
                self._training_step.index = index
                if self.epoch_batches:
                    self._training_step.index = index % self.epoch_batches
                if sizes is not None:
                    is_real = _real_samples(batch[1], sizes)
                    batch = (batch[0], batch[1].masked_fill(~is_real, UNLABELLED))
                losses, logged = stacked.forward(
                    self._training_step,
                    values,
                    batch,
                    shared=shared,
                    places=self._places,
                    randomness=randomness,
                    sizes=sizes,
                )

        # Made once and kept, so that a step launches no kernel for them.
        if self._ones.shape != losses.shape or self._ones.dtype != losses.dtype:
            self._ones = torch.ones_like(losses)

        # The gradient of each client's loss is its own: no loss depends on another client's model.
        # This is what torch.autograd.grad calls, with less Python.
        gradients: Sequence[Tensor | None] = run_backward(
            (losses,), (self._ones,), False, False, tuple(leaves), True, accumulate_grad=False
        )
        return losses.detach(), logged, list(gradients)

    def _find_places(self, names: Sequence[str]) -> stacked.Places:
        """Find where the tensors of these names lie in the module that is called."""
        if self._is_cross_entropy:
            return stacked.Places(self._module, names, known=self._known)

        return stacked.Places(self._training_step, names, "module.", known=self._known)


def _cross_entropies(logits: Tensor, labels: Tensor, sizes: Tensor | None) -> Tensor:
    """Return the mean loss of each client, of shape (K,).

    Args:
        logits: (K, B, C).
        labels: (K, B).
        sizes: Number of samples of each client that count, of shape (K,); None if all B count.
    """
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.view(labels.shape)
    if sizes is None:
        return losses.mean(1)

    return (losses * _real_samples(labels, sizes)).sum(1) / sizes


def _real_samples(labels: Tensor, sizes: Tensor) -> Tensor:
    """Return which samples belong to their client, (K, B); the others have been filled up.

    Args:
        labels: (K, B).
        sizes: Number of samples of each client, (K,).
    """
    return torch.arange(labels.shape[1], device=labels.device) < sizes[:, None]


class _TrainingStep(nn.Module):
    """Calls `training_step` as a forward pass; returns the loss and what the step logged.

    Attributes:
        module: The module of the group.
        index: The number of the batch that the step is told.
    """

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module
        self.index = 0

    @override
    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logged: dict[str, Tensor] = {}
        log = self.module.log
        log_dict = self.module.log_dict

        # Under `vmap` a value that is logged stands for K clients: it has to leave the step as one
        # of its outputs.
        self.module.log = partial(_note, logged)  # type: ignore[method-assign]
        self.module.log_dict = partial(_note_all, logged)  # type: ignore[method-assign]
        try:
            output = self.module.training_step(batch, self.index)
        finally:
            self.module.log = log  # type: ignore[method-assign]
            self.module.log_dict = log_dict  # type: ignore[method-assign]

        loss: Any = output["loss"] if isinstance(output, dict) else output
        if loss is None:
            raise NotImplementedError("a training_step that skips batches")

        return loss.reshape(()), logged


def _note(logged: dict[str, Tensor], name: str, value: Any, *_: Any, **options: Any) -> None:
    """Stand in for `self.log` in a step of K clients, which can log plain numbers only.

    Raises:
        NotImplementedError: A pack cannot log this. The clients then train one after the other.
    """
    check_mean(name, options)
    if options.get("batch_size") is not None or name in logged:
        raise NotImplementedError(f"self.log of {name} twice, or with a batch_size")
    if not isinstance(value, Tensor | int | float):
        raise NotImplementedError(f"self.log of a {type(value).__name__}")

    logged[name] = torch.as_tensor(value).detach().reshape(())


def _note_all(
    logged: dict[str, Tensor], values: Mapping[str, Any], *_: Any, **options: Any
) -> None:
    """Stand in for `self.log_dict`."""
    for name, value in values.items():
        _note(logged, name, value, **options)
