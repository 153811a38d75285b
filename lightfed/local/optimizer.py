"""The base of all steppers, which take the optimiser steps of a local session.

An optimiser is created once per live module and its state is cleared for every session. In most
papers momentum does not survive a round; if it does, `Proximal` carries it to the next session.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Params = list[Tensor]
GradientHook = Callable[[Tensor], None]


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping of the Trainer.

    Attributes:
        limit: of each value or of the norm.
        algorithm: by "norm" of all parameters, by "value", or by the norm of each "network".
        networks: index of each parameter's network; empty for a single network.
    """

    limit: float
    algorithm: str = "norm"
    networks: tuple[int, ...] = ()

    def __call__(self, grads: Params, used: Sequence[int]) -> None:
        """Change gradients in place; `used` are their positions among all parameters."""
        if self.algorithm == "value":
            torch._foreach_clamp_min_(grads, -self.limit)
            torch._foreach_clamp_max_(grads, self.limit)
        elif not self.networks:
            self._scale(grads)
        else:
            parts: dict[int, Params] = {}
            for position, grad in zip(used, grads, strict=True):
                parts.setdefault(self.networks[position], []).append(grad)
            for part in parts.values():
                self._scale(part)

    def of(self, module: nn.Module, optimizer: Optimizer) -> "Clipping":
        """The clipping for an optimiser over a module's parameters.

        A module may name parts to clip as separate networks, `clipped_apart`. The remaining
        parameters form one more.
        """
        if self.algorithm != "network":
            return self
        prefixes = [
            f"{path}.{name}.".lstrip(".")
            for path, part in module.named_modules()
            for name in getattr(part, "clipped_apart", ())
        ]
        network = {
            id(p): next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), -1)
            for name, p in module.named_parameters()
        }
        order = [id(p) for group in optimizer.param_groups for p in group["params"]]
        return replace(self, networks=tuple(network.get(p, -1) for p in order))

    def _scale(self, grads: Params) -> None:
        norm = nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, torch.clamp(self.limit / (norm + 1e-6), max=1.0))


@dataclass(eq=False)
class Proximal:
    """A session's pull towards a model: adds gamma (w - anchor) to the gradient.

    Attributes:
        anchor: (P,) the parameters of that model.
        gamma: weight of the pull.
        carries: the optimiser starts from `momentum` and stores its final value there.
        momentum: (P,) SGD's buffer, 0 for parameters without a gradient so far. For an accelerated
            optimiser, the offset of its first point from the parameters. None for none.
        gap: norm of the last step's gradient mapping after the session, if the optimiser has one.
    """

    anchor: Tensor
    gamma: float
    carries: bool = False
    momentum: Tensor | None = None
    gap: Tensor | None = None


def aligned(values: Params, row: Tensor, other: Tensor) -> Params:
    """Views of `other` at the positions that `values` have in `row`."""
    starts = [(v.data_ptr() - row.data_ptr()) // row.element_size() for v in values]
    return [
        other[start : start + v.numel()].view(v.shape)
        for start, v in zip(starts, values, strict=True)
    ]


def apart(grads: Params) -> Params:
    """Gradients that can be changed in place.

    Autograd gives the terms of a sum one tensor, and one of a loss the seed of the backward pass.
    """
    found: Params = []
    taken: set[int] = set()
    for grad in grads:
        memory = grad.untyped_storage().data_ptr()
        shared = memory in taken or 0 in grad.stride() or grad.numel() == 1
        taken.add(memory)
        found.append(grad.clone(memory_format=torch.contiguous_format) if shared else grad)
    return found


class _Pull:
    """Adds gamma (w - anchor) to the gradients of a session."""

    def __init__(self, values: Params, row: Tensor, proximal: Proximal) -> None:
        self._gamma = proximal.gamma
        self._values = values
        self._anchors = aligned(values, row, proximal.anchor)

    def __call__(self, grads: Params, used: Sequence[int]) -> None:
        values = [self._values[i] for i in used]
        distances = torch._foreach_sub(values, [self._anchors[i] for i in used])
        torch._foreach_add_(grads, distances, alpha=self._gamma)


class FlatGradient:
    """The gradients of a session's parameters as one row, for an algorithm's hook.

    `values` are the parameters, `row` (P,) the row that they are views of.
    """

    def __init__(self, values: Params, row: Tensor) -> None:
        self._flat = torch.zeros_like(row)
        self._parts = aligned(values, row, self._flat)

    def changed(self, hook: GradientHook, grads: Params, used: Sequence[int]) -> Params:
        """The gradients of the used parameters after the hook."""
        if len(used) < len(self._parts):
            self._flat.zero_()
        parts = [self._parts[i] for i in used]
        torch._foreach_copy_(parts, grads)
        hook(self._flat)
        return parts


class Stepper(ABC):
    """Updates a row from the loss of a batch; clips gradients, and projects onto a box.

    Attributes:
        box: bounds of every parameter, or None.
        in_row: whether all parameters must lie in the row.
        optimizer: of torch, whose steps these are; None if schedulers or a scaler act too.
        factors: of every parameter's learning rate, if they differ.
        rate: the configured rate, to which groups of other rates keep their ratio; None for that
            of the first group.
    """

    box: tuple[float, float] | None = None
    in_row = False
    optimizer: Optimizer | None = None
    factors: Sequence[float] | None = None
    rate: float | None = None

    def __init__(self, clipping: Clipping | None) -> None:
        self.clipping = clipping
        self._values: Params = []
        self._row = torch.empty(0)
        self._pull: _Pull | None = None
        self._flat: FlatGradient | None = None

    @abstractmethod
    def reset(
        self, lr: float | None, values: Params, row: Tensor, proximal: Proximal | None
    ) -> None:
        """Start a new session: clear all state but what `proximal` carries.

        `lr` None keeps the optimiser's own rate. `values` are views of `row` (P,), to which the
        parameters are bound.
        """

    @abstractmethod
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        """Freeze all other parameters, with their optimiser state, until the next call or session.

        A UserError if the optimiser moves all parameters at once.
        """

    @abstractmethod
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        """One update from a scalar loss; the hook may change the gradient (P,) before clipping."""

    def epoch_end(self) -> None:  # noqa: B027 - few steppers care
        """Called after a local epoch."""

    def finish(self) -> None:  # noqa: B027 - few steppers care
        """Called after the session: the row must then hold the model."""

    def _begin(self, values: Params, row: Tensor, proximal: Proximal | None) -> None:
        """Take the tensors of a new session."""
        self._values, self._row, self._flat = values, row, None
        self._pull = None if proximal is None else _Pull(values, row, proximal)

    def _hooked(self, hook: GradientHook, grads: Params, used: Sequence[int]) -> Params:
        if self._flat is None:
            self._flat = FlatGradient(self._values, self._row)
        return self._flat.changed(hook, grads, used)

    def _adjusted(self, grads: Params, used: Sequence[int], hook: GradientHook | None) -> Params:
        """The gradients of the used parameters after the hook, the pull and clipping."""
        if hook is not None:
            grads = self._hooked(hook, grads, used)
        elif self._pull is not None or self.clipping is not None:
            grads = apart(grads)
        if self._pull is not None:
            self._pull(grads, used)
        if self.clipping is not None:
            self.clipping(grads, used)
        return grads
