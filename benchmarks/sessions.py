"""Local epochs in plain PyTorch: one client after the other, or all in one set of operators.

Three ways: `OneByOne` as one writes it, with a new torch.optim.SGD for every client; the same
tuned, with all that is known to help on a CPU; and `Batched`.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override
from workloads import BATCH_SIZE, LEARNING_RATE

from lightfed.models.image_format import guarded

Tensors = list[Tensor]


class Sessions(ABC):
    """Trains clients of one architecture.

    Args:
        model: in training mode; its values do not matter.
        x: (N, ...) the samples of all clients.
        y: (N,) their labels.
        batch: samples of a step.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, *, batch: int = BATCH_SIZE) -> None:
        self.model = model
        self.batch = batch
        self.x, self.y = x, y
        self.convolves = any(isinstance(part, nn.Conv2d) for part in model.modules())

    @abstractmethod
    def summed(self, start: Tensors, order: Tensor, held: Tensor | None = None) -> Tensors:
        """The sum of the clients' models after an epoch from the same start.

        Args:
            start: the parameters.
            order: (K, n) indices of the clients' samples.
            held: (K, C) the labels that a client holds; the other logits are set to zero, and its
                other rows of the output layer are not added. None for all.
        """

    @abstractmethod
    def train_(self, stacks: Tensors, order: Tensor, masks: Tensors) -> None:
        """An epoch of every client from its own model, in place, under its mask.

        Args:
            stacks: (K, *shape) each.
            order: as of `summed`.
            masks: float, as `stacks`; the models are 0 where they are.
        """

    @abstractmethod
    def gradients(self, stacks: Tensors, batch: Tensor) -> Tensors:
        """(K, *shape) each: the gradients of one batch (K, B) a client, in evaluation mode."""


class OneByOne(Sessions):
    """One client after the other, in one model object.

    Args:
        model: as of `Sessions`.
        x: as of `Sessions`.
        y: as of `Sessions`.
        tuned: convolutions on channels_last if safe, gradients without .grad and an optimizer.
        batch: as of `Sessions`.
    """

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, *, tuned: bool, batch: int = BATCH_SIZE
    ) -> None:
        super().__init__(model, x, y, batch=batch)
        self._tuned = tuned
        self._last = tuned and self.convolves and not guarded(model)
        if self._last:
            model.to(memory_format=torch.channels_last)
            self.x = x.permute(0, 2, 3, 1).contiguous()
        self._leaves = list(model.parameters())
        self._values = [leaf.detach() for leaf in self._leaves]

    @override
    def summed(self, start: Tensors, order: Tensor, held: Tensor | None = None) -> Tensors:
        sums = [torch.zeros_like(value) for value in self._values]
        for k, index in enumerate(order):
            torch._foreach_copy_(self._values, start)
            labels = None if held is None else held[k]
            self._epoch(index, held=labels)
            if labels is not None:
                torch._foreach_mul_(self._values[-2:], [labels.unsqueeze(1), labels])
            torch._foreach_add_(sums, self._values)
        return sums

    @override
    def train_(self, stacks: Tensors, order: Tensor, masks: Tensors) -> None:
        for k, index in enumerate(order):
            own = [stack[k] for stack in stacks]
            torch._foreach_copy_(self._values, own)
            self._epoch(index, masks=[mask[k] for mask in masks])
            torch._foreach_copy_(own, self._values)

    @override
    def gradients(self, stacks: Tensors, batch: Tensor) -> Tensors:
        found = [torch.empty_like(stack) for stack in stacks]
        self.model.eval()
        for k, index in enumerate(batch):
            torch._foreach_copy_(self._values, [stack[k] for stack in stacks])
            loss = F.cross_entropy(self.model(self._gather(index)), self.y.index_select(0, index))
            grads = torch.autograd.grad(loss, self._leaves)
            torch._foreach_copy_([place[k] for place in found], grads)
        self.model.train()
        return found

    def _epoch(
        self, index: Tensor, *, held: Tensor | None = None, masks: Tensors | None = None
    ) -> None:
        optimizer = None if self._tuned else torch.optim.SGD(self._leaves, lr=LEARNING_RATE)
        xs, ys = self._gather(index), self.y.index_select(0, index)
        for x, y in zip(xs.split(self.batch), ys.split(self.batch), strict=True):
            logits = self.model(x)
            if held is not None:
                logits = logits.masked_fill(~held, 0.0)
            loss = F.cross_entropy(logits, y)
            if optimizer is None:
                grads = torch.autograd.grad(loss, self._leaves)
                if masks is not None:
                    torch._foreach_mul_(grads, masks)
                torch._foreach_add_(self._values, grads, alpha=-LEARNING_RATE)
                continue
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if masks is not None:
                torch._foreach_mul_([leaf.grad for leaf in self._leaves], masks)
            optimizer.step()

    def _gather(self, index: Tensor) -> Tensor:
        x = self.x.index_select(0, index)
        return x.permute(0, 3, 1, 2) if self._last else x


class Batched(Sessions):
    """All clients at once: grouped convolutions, and `baddbmm` for linear layers.

    Takes networks that run their layers in the order of their definition.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, *, batch: int = BATCH_SIZE) -> None:
        super().__init__(model, x, y, batch=batch)
        self._layers = [part for part in model.modules() if not list(part.children())]

    @override
    def summed(self, start: Tensors, order: Tensor, held: Tensor | None = None) -> Tensors:
        stacks = [value.unsqueeze(0).repeat(len(order), *[1] * value.dim()) for value in start]
        self._epoch(stacks, order, held=held)
        if held is not None:
            torch._foreach_mul_(stacks[-2:], [held.unsqueeze(2), held])
        return [stack.sum(0) for stack in stacks]

    @override
    def train_(self, stacks: Tensors, order: Tensor, masks: Tensors) -> None:
        self._epoch(stacks, order, masks=masks)

    @override
    def gradients(self, stacks: Tensors, batch: Tensor) -> Tensors:
        self.model.eval()
        leaves = [stack.detach().requires_grad_() for stack in stacks]
        found = torch.autograd.grad(self._loss(leaves, batch, None), leaves)
        self.model.train()
        return list(found)

    def _epoch(
        self,
        stacks: Tensors,
        order: Tensor,
        *,
        held: Tensor | None = None,
        masks: Tensors | None = None,
    ) -> None:
        leaves = [stack.detach().requires_grad_() for stack in stacks]
        for index in order.split(self.batch, 1):
            grads = torch.autograd.grad(self._loss(leaves, index, held), leaves)
            if masks is not None:
                torch._foreach_mul_(grads, masks)
            torch._foreach_add_(stacks, grads, alpha=-LEARNING_RATE)

    def _loss(self, leaves: Tensors, index: Tensor, held: Tensor | None) -> Tensor:
        """The sum over the clients of their mean losses over a batch (K, B)."""
        logits = self._logits(leaves, index)
        if held is not None:
            logits = logits.masked_fill(~held.unsqueeze(1), 0.0)
        labels = self.y.index_select(0, index.flatten()).view(index.shape)
        # Along the last dimension a CPU's softmax over 10 classes takes six times as long.
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / index.shape[1]

    def _logits(self, leaves: Tensors, index: Tensor) -> Tensor:
        """(K, B, C).

        Activations are (B, K x channels, H, W) up to the flattening, (K, B, F) after it.
        """
        count, size = index.shape
        places = index.t() if self.convolves else index
        x = self.x.index_select(0, places.flatten())
        x = x.view(size, -1, *x.shape[2:]) if self.convolves else x.view(count, size, *x.shape[1:])
        given = iter(leaves)
        for layer in self._layers:
            if isinstance(layer, nn.Linear):
                weight, bias = next(given), next(given)
                x = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
            elif isinstance(layer, nn.Conv2d):
                weight, bias = next(given).flatten(0, 1), next(given).flatten()
                x = F.conv2d(x, weight, bias, layer.stride, layer.padding, groups=count)
            elif isinstance(layer, nn.BatchNorm2d):
                weight, bias = next(given).flatten(), next(given).flatten()
                x = F.batch_norm(x, None, None, weight, bias, training=True, eps=layer.eps)
            elif isinstance(layer, nn.Flatten):
                x = x.view(size, count, -1).transpose(0, 1) if self.convolves else x.flatten(2)
            else:
                x = layer(x)
        return x
