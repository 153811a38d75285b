"""Optimiser steps of a local session, as cheap as the optimiser allows.

An optimiser is created once per live module and its state is cleared for every session. In most
papers momentum does not survive a round; if it does, `Proximal` carries it to the next session.
Plain SGD, the optimiser of every paper here, bypasses the optimiser object: gradients come directly
from autograd, and a few foreach calls give the same bits as torch.optim.SGD at half the cost.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightfed.utils.errors import UserError

Params = list[Tensor]
# What torch.autograd.grad calls. The name is private: a test and the pinned torch guard it.
_run_backward = Variable._execution_engine.run_backward
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
        """Change gradients in place.

        Args:
            grads: of some parameters.
            used: their positions among all parameters.
        """
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


class Stepper(ABC):
    """Updates a row from the loss of a batch.

    Attributes:
        box: bounds of every parameter, if the optimiser projects onto them.
    """

    box: tuple[float, float] | None = None

    @abstractmethod
    def reset(
        self, lr: float | None, values: Params, row: Tensor, proximal: Proximal | None
    ) -> None:
        """Start a new session: clear all state but what `proximal` carries.

        Args:
            lr: learning rate of the round; None keeps the optimiser's own.
            values: the views of the row that the parameters are bound to.
            row: (P,) the parameters of the row.
            proximal: pull of this session.
        """

    @abstractmethod
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        """Freeze all other parameters, with their optimiser state, until the next call or session.

        Raises:
            UserError: the optimiser moves all parameters at once.
        """

    @abstractmethod
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        """One update.

        Args:
            loss: scalar.
            hook: may change the gradient in place before clipping, (P,) in the order of the row.
        """

    def epoch_end(self) -> None:  # noqa: B027 - few steppers care
        """Called after a local epoch."""

    def finish(self) -> None:  # noqa: B027 - few steppers care
        """Called after the session: the row must then hold the model."""


class _Pull:
    """Adds gamma (w - anchor) to the gradients of a session."""

    def __init__(self, values: Params, row: Tensor, proximal: Proximal) -> None:
        self._gamma = proximal.gamma
        self._values = values
        self._anchors = aligned(values, row, proximal.anchor)

    def __call__(self, grads: Params, used: list[int]) -> None:
        values = [self._values[i] for i in used]
        distances = torch._foreach_sub(values, [self._anchors[i] for i in used])
        torch._foreach_add_(grads, distances, alpha=self._gamma)


class FlatGradient:
    """The gradients of a session's parameters as one row, for an algorithm's hook.

    Args:
        values: the parameters.
        row: (P,) the row that they are views of.
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


class SGDStepper(Stepper):
    """torch.optim.SGD on a list of tensors, bit for bit.

    Gradients are taken with respect to the module's parameters and applied to the views of the
    bound row that they alias. These are plain tensors, which need no `no_grad`.

    Attributes:
        clipping: of gradients.
    """

    def __init__(
        self,
        params: Params,
        group: dict[str, Any],
        clipping: Clipping | None,
        factors: Sequence[float] | None = None,
    ) -> None:
        self._params = self._inputs = tuple(params)
        self._trained: Sequence[int] = range(len(params))  # positions of the inputs
        self._factors = factors  # of every parameter's learning rate
        self._lr: float = group["lr"]
        self._momentum: float = group["momentum"]
        self._dampening: float = group["dampening"]
        self._weight_decay: float = group["weight_decay"]
        self._nesterov: bool = group["nesterov"]
        self.clipping = clipping
        self._values: Params = []
        self._row = torch.empty(0)
        self._buffers: list[Tensor | None] = []
        self._proximal: Proximal | None = None
        self._pull: _Pull | None = None
        self._flat: FlatGradient | None = None
        self._one = torch.ones((), device=params[0].device)

    @override
    def reset(
        self, lr: float | None, values: Params, row: Tensor, proximal: Proximal | None
    ) -> None:
        self._values, self._row, self._proximal, self._flat = values, row, proximal, None
        self._inputs, self._trained = self._params, range(len(self._params))
        self._pull = None if proximal is None else _Pull(values, row, proximal)
        self._buffers = [None] * len(values)
        if proximal is not None and proximal.momentum is not None:
            self._buffers = [*aligned(values, row, proximal.momentum.clone())]
        if lr is not None:
            self._lr = lr

    @override
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        chosen = {id(p) for p in parameters}
        self._trained = [i for i, p in enumerate(self._params) if id(p) in chosen]
        self._inputs = tuple(self._params[i] for i in self._trained)

    @override
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        found = zip(self._trained, self._gradients(loss), strict=True)
        # Parameters outside the graph are skipped, as optimisers skip those without a gradient.
        grads = {i: grad for i, grad in found if grad is not None}
        used = [*grads]
        everything = len(used) == len(self._params)
        values = self._values if everything else [self._values[i] for i in used]
        self.update(values, [*grads.values()], used, hook)

    def _gradients(self, loss: Tensor) -> tuple[Any, ...]:
        """torch.autograd.grad without its Python overhead, a fifth of a small model's step."""
        if self._one.dtype != loss.dtype:
            self._one = self._one.to(loss.dtype)
        scalar = loss if loss.dim() == 0 else loss.reshape(())
        return _run_backward(
            (scalar,), (self._one,), False, False, self._inputs, True, accumulate_grad=False
        )

    def update(
        self, values: Params, grads: Params, used: list[int], hook: GradientHook | None
    ) -> None:
        """One step from gradients.

        Args:
            values: of the used parameters.
            grads: of the used parameters; may be overwritten.
            used: their positions among all parameters.
            hook: as of `step`.
        """
        if hook is not None:
            grads = self._hooked(hook, grads, used)
        if self._pull is not None:
            self._pull(grads, used)
        if self.clipping is not None:
            self.clipping(grads, used)
        if self._weight_decay:
            grads = list(torch._foreach_add(grads, values, alpha=self._weight_decay))
        if self._momentum:
            buffers = self._accumulate(grads, used)
            grads = (
                list(torch._foreach_add(grads, buffers, alpha=self._momentum))
                if self._nesterov
                else buffers
            )
        if self._factors is not None:
            grads = list(torch._foreach_mul(grads, [self._factors[i] for i in used]))
        torch._foreach_add_(values, grads, alpha=-self._lr)

    def twin(self) -> "SGDStepper":
        """Another stepper of these settings, for another row."""
        return copy(self)

    def narrow(self, clients: int) -> None:
        """Keep the state of the first clients only, where every value is (K, *shape)."""
        self._values = [value[:clients] for value in self._values]
        self._buffers = [None if b is None else b[:clients] for b in self._buffers]

    def _hooked(self, hook: GradientHook, grads: Params, used: list[int]) -> Params:
        if self._flat is None:
            self._flat = FlatGradient(self._values, self._row)
        return self._flat.changed(hook, grads, used)

    def _accumulate(self, grads: Params, used: list[int]) -> Params:
        """B <- momentum b + (1 - dampening) g; a buffer starts as the first gradient."""
        old = [
            (b, g) for i, g in zip(used, grads, strict=True) if (b := self._buffers[i]) is not None
        ]
        if old:
            buffers = [b for b, _ in old]
            torch._foreach_mul_(buffers, self._momentum)
            torch._foreach_add_(buffers, [g for _, g in old], alpha=1 - self._dampening)
        if len(old) < len(used):
            for i, grad in zip(used, grads, strict=True):
                if self._buffers[i] is None:
                    self._buffers[i] = grad.clone()
        return [b for i in used if (b := self._buffers[i]) is not None]

    @override
    def finish(self) -> None:
        if self._proximal is None or not self._proximal.carries or not self._momentum:
            return
        momentum = self._proximal.momentum = torch.zeros_like(self._row)
        for part, buffer in zip(
            aligned(self._values, self._row, momentum), self._buffers, strict=True
        ):
            if buffer is not None:
                part.copy_(buffer)


class OptimizerStepper(Stepper):
    """Any torch optimiser, with its schedulers and one loss scaler per session.

    Args:
        optimizer: over the live module's parameters.
        schedulers: stepped after every batch or epoch, according to their interval.
        scaler: makes a new GradScaler; one shared by all clients would depend on their placement.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        schedulers: list[LRSchedulerConfig],
        clipping: Clipping | None,
        scaler: Callable[[], torch.amp.GradScaler] | None,
    ) -> None:
        self._optimizer = optimizer
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._trained: Sequence[Tensor] | None = None  # all
        self._groups = [
            {k: deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups
        ]
        self._schedulers = schedulers
        self._scheduler_states = [deepcopy(s.scheduler.state_dict()) for s in schedulers]
        self.clipping = clipping
        self._make_scaler = scaler
        self._counts = {"step": 0, "epoch": 0}  # of the session, for schedulers of a frequency
        self._scaler: torch.amp.GradScaler | None = None
        self._pull: _Pull | None = None
        self._row = torch.empty(0)
        self._flat: FlatGradient | None = None
        self._carries = False

    @property
    def plain_optimizer(self) -> Optimizer | None:
        """The optimiser, if nothing but its steps changes the parameters of one group."""
        plain = not self._schedulers and self._make_scaler is None and len(self._groups) == 1
        return self._optimizer if plain else None

    @override
    def reset(
        self, lr: float | None, values: Params, row: Tensor, proximal: Proximal | None
    ) -> None:
        self._pull = None if proximal is None else _Pull(self._params, row, proximal)
        self._row, self._flat = row, None
        self._carries = proximal is not None and proximal.carries
        self._trained = None
        self._optimizer.state.clear()
        for group, initial in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(deepcopy(initial))
            if lr is not None:
                group["lr"] = lr
        for config, state in zip(self._schedulers, self._scheduler_states, strict=True):
            config.scheduler.load_state_dict(deepcopy(state))
        self._counts = {"step": 0, "epoch": 0}
        self._scaler = self._make_scaler() if self._make_scaler else None

    @override
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        self._trained = parameters

    @override
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        scaler = self._scaler
        (loss if scaler is None else scaler.scale(loss)).backward(inputs=self._trained)
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        self._adjust(hook)
        if scaler is None:
            self._optimizer.step()
        else:
            scaler.step(self._optimizer)
            scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule("step")

    @override
    def epoch_end(self) -> None:
        self._schedule("epoch")

    @override
    def finish(self) -> None:
        if self._carries and any(self._optimizer.state.values()):
            found = f"{type(self._optimizer).__name__}, whose state ends with a session"
            fix = (
                "use ASPG, or torch.optim.SGD in 32 or bf16-mixed without a scheduler; or set "
                "model.algorithm.init_args.momentum: session"
            )
            raise UserError("model.optimizer", found, fix)

    def _schedule(self, interval: str) -> None:
        self._counts[interval] += 1
        for config in self._schedulers:
            if config.interval == interval and self._counts[interval] % config.frequency == 0:
                config.scheduler.step()  # type: ignore[call-arg]

    @torch.no_grad()
    def _adjust(self, hook: GradientHook | None) -> None:
        used = [i for i, p in enumerate(self._params) if p.grad is not None]
        grads = [g for i in used if (g := self._params[i].grad) is not None]
        if hook is not None:
            if self._flat is None:
                self._flat = FlatGradient(self._params, self._row)
            torch._foreach_copy_(grads, self._flat.changed(hook, grads, used))
        if self._pull is not None:
            self._pull(grads, used)
        if self.clipping is not None:
            self.clipping(grads, used)


def make_stepper(
    optimizer: Optimizer,
    *,
    schedulers: list[LRSchedulerConfig],
    clipping: Clipping | None,
    scaler: Callable[[], torch.amp.GradScaler] | None,
    trainable: Sequence[Tensor] | None = None,
    factors: Sequence[float] | None = None,
) -> Stepper:
    """The cheapest stepper that does exactly what `optimizer` would.

    Args:
        optimizer: over parameters of the live module.
        schedulers: of the optimizer.
        clipping: of gradients.
        scaler: makes a loss scaler.
        trainable: the live module's parameters; the optimizer's may differ, also in order.
        factors: of every parameter's learning rate; only for torch.optim.SGD.
    """
    own = getattr(optimizer, "stepper", None)
    if own is not None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        all_of_them = trainable is None or [id(p) for p in trainable] == [id(p) for p in params]
        if schedulers or len(optimizer.param_groups) > 1 or not all_of_them:
            found = (
                f"{type(optimizer).__name__} with a scheduler, groups or a part of the parameters"
            )
            fix = "return it alone, with all of them: configure_optimizers"
            raise UserError("model.clients", found, fix)
        if scaler is not None:
            found = f"16-mixed, and {type(optimizer).__name__} does not support loss scaling"
            raise UserError("trainer.precision", found, "use bf16-mixed or 32")
        return own(clipping)
    group = optimizer.param_groups[0]
    plain = (
        type(optimizer) is SGD
        and len(optimizer.param_groups) == 1
        and not schedulers
        and scaler is None
        and all(p.requires_grad for p in group["params"])
        and (trainable is None or [id(p) for p in trainable] == [id(p) for p in group["params"]])
        and not any(group.get(k) for k in ("maximize", "differentiable", "fused"))
        and not isinstance(group["lr"], Tensor)
    )
    if plain:
        return SGDStepper(group["params"], group, clipping, factors)
    if factors is not None:
        found = f"{type(optimizer).__name__}, but a part has its own learning rate"
        raise UserError("model.optimizer", found, "use torch.optim.SGD, in 32 or bf16-mixed")
    return OptimizerStepper(optimizer, schedulers=schedulers, clipping=clipping, scaler=scaler)
