"""One optimiser step of a local session, as lean as the optimiser allows.

An optimiser is made once per live module; a fresh one for every session (in the papers momentum never survives a
round) is the same object with its state cleared. Plain SGD, the optimiser of every paper here, skips the optimiser
object: gradients straight from autograd, a few foreach calls, the same bits as torch.optim.SGD at half its cost.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

Params = list[Tensor]
GradientHook = Callable[[Params, Params], None]


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping of the Trainer: by "norm" (of all parameters) or by "value"."""

    limit: float
    algorithm: str = "norm"

    def __call__(self, grads: Params) -> None:
        if self.algorithm == "value":
            torch._foreach_clamp_min_(grads, -self.limit)
            torch._foreach_clamp_max_(grads, self.limit)
            return
        norm = nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, torch.clamp(self.limit / (norm + 1e-6), max=1.0))


class Stepper(ABC):
    """Takes the loss of a batch to an updated row."""

    @abstractmethod
    def reset(self, lr: float | None) -> None:
        """A new session: no state; `lr` of the round, or None to keep the optimiser's own."""

    @abstractmethod
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        """One update.

        Args:
            loss: scalar.
            hook: may change the gradients in place, given (parameters, gradients); before clipping.
        """

    def epoch_end(self) -> None:
        """A local epoch is over."""


class SGDStepper(Stepper):
    """torch.optim.SGD on a list of tensors, bit for bit."""

    def __init__(self, params: Params, group: dict[str, Any], clipping: Clipping | None) -> None:
        self._params = params
        self._lr: float = group["lr"]
        self._momentum: float = group["momentum"]
        self._dampening: float = group["dampening"]
        self._weight_decay: float = group["weight_decay"]
        self._nesterov: bool = group["nesterov"]
        self._clipping = clipping
        self._buffers: dict[int, Tensor] = {}

    @override
    def reset(self, lr: float | None) -> None:
        self._buffers.clear()
        if lr is not None:
            self._lr = lr

    @override
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        params = self._params
        grads: Sequence[Tensor | None] = torch.autograd.grad(loss, params, allow_unused=True)
        if any(g is None for g in grads):
            # A parameter outside the graph is left alone, as by an optimiser that finds no gradient.
            used = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
            params, grads = [p for p, _ in used], [g for _, g in used]
        self._update(params, list(grads), hook)  # type: ignore[arg-type]

    @torch.no_grad()
    def _update(self, params: Params, grads: Params, hook: GradientHook | None) -> None:
        if hook is not None:
            hook(params, grads)
        if self._clipping is not None:
            self._clipping(grads)
        if self._weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=self._weight_decay))
        if self._momentum:
            grads = self._apply_momentum(params, grads)
        torch._foreach_add_(params, grads, alpha=-self._lr)

    def _apply_momentum(self, params: Params, grads: Params) -> Params:
        fresh = {
            id(p): g.clone()
            for p, g in zip(params, grads, strict=True)
            if id(p) not in self._buffers
        }
        old = [
            (self._buffers[id(p)], g)
            for p, g in zip(params, grads, strict=True)
            if id(p) not in fresh
        ]
        if old:
            buffers = [b for b, _ in old]
            torch._foreach_mul_(buffers, self._momentum)
            torch._foreach_add_(buffers, [g for _, g in old], alpha=1 - self._dampening)
        self._buffers |= fresh
        buffers = [self._buffers[id(p)] for p in params]
        if self._nesterov:
            return list(torch._foreach_add(grads, buffers, alpha=self._momentum))
        return buffers


class OptimizerStepper(Stepper):
    """Any torch optimiser, with its schedulers and, for 16-mixed, a gradient scaler of the session's own.

    Args:
        optimizer: over the live module's parameters.
        schedulers: stepped after every batch or epoch, as their interval says.
        scaler: makes a fresh GradScaler; one shared by all clients would depend on how they lie on ranks.
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
        self._groups = [
            {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
        ]
        self._schedulers = schedulers
        self._scheduler_states = [deepcopy(s.scheduler.state_dict()) for s in schedulers]
        self._clipping = clipping
        self._make_scaler = scaler
        self._scaler: torch.amp.GradScaler | None = None

    @override
    def reset(self, lr: float | None) -> None:
        self._optimizer.state.clear()
        for group, initial in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(initial)
            if lr is not None:
                group["lr"] = lr
        for config, state in zip(self._schedulers, self._scheduler_states, strict=True):
            config.scheduler.load_state_dict(deepcopy(state))
        self._scaler = self._make_scaler() if self._make_scaler else None

    @override
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        scaler = self._scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
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

    def _schedule(self, interval: str) -> None:
        for config in self._schedulers:
            if config.interval == interval:
                config.scheduler.step()  # type: ignore[call-arg]

    @torch.no_grad()
    def _adjust(self, hook: GradientHook | None) -> None:
        params = [p for p in self._params if p.grad is not None]
        grads = [p.grad for p in params if p.grad is not None]
        if hook is not None:
            hook(params, grads)
        if self._clipping is not None:
            self._clipping(grads)


def make_stepper(
    optimizer: Optimizer,
    *,
    schedulers: list[LRSchedulerConfig],
    clipping: Clipping | None,
    scaler: Callable[[], torch.amp.GradScaler] | None,
) -> Stepper:
    """The leanest stepper that does exactly what `optimizer` would."""
    group = optimizer.param_groups[0]
    plain = (
        type(optimizer) is SGD
        and len(optimizer.param_groups) == 1
        and not schedulers
        and scaler is None
        and not any(group.get(k) for k in ("maximize", "differentiable", "fused"))
        and not isinstance(group["lr"], Tensor)
    )
    if plain:
        return SGDStepper(group["params"], group, clipping)
    return OptimizerStepper(optimizer, schedulers=schedulers, clipping=clipping, scaler=scaler)
