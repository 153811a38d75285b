"""Steppers, which take the optimiser steps of a local session.

An optimiser is created once per live module, and is put back to what it was then for every session.
In most papers momentum does not survive a round; if it does, `Proximal` carries the state to the
next session.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.optim import Optimizer

from lightfed.state.optimizer_state import OptimizerState, flat_slots, parameters_of
from lightfed.utils.errors import require

# What Tensor.backward calls. The name is private: a test and the pinned torch guard it.
run_backward = Variable._execution_engine.run_backward

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

        A module may name parts to clip as separate networks, `clipped_separately`. The remaining
        parameters form one more.
        """
        if self.algorithm != "network":
            return self
        prefixes = [
            f"{path}.{name}.".lstrip(".")
            for path, part in module.named_modules()
            for name in getattr(part, "clipped_separately", ())
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
        momentum: (S P,) the S parts of the optimiser's state, such as SGD's buffer; 0 for
            parameters without a gradient so far. For an accelerated optimiser (P,), the offset of
            its first point from the parameters. For one that keeps anything else, such as factors
            of other shapes or a counter of its own, the bytes of its whole state. None for none.
        decay: (P,) the weights of a decay, which times the parameters joins the gradient after
            clipping. None for none.
    """

    anchor: Tensor
    gamma: float
    carries: bool = False
    momentum: Tensor | None = None
    decay: Tensor | None = None


def views_at(values: Params, row: Tensor, other: Tensor) -> Params:
    """Views of `other` at the positions that `values` have in `row`."""
    starts = [(v.data_ptr() - row.data_ptr()) // row.element_size() for v in values]
    return [
        other[start : start + v.numel()].view(v.shape)
        for start, v in zip(starts, values, strict=True)
    ]


def separate(grads: Params) -> Params:
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


class Stepper:
    """Updates a row from the loss of a batch by an optimiser of torch; clips gradients.

    Args:
        optimizer: as it was made; every session begins with it as it is now.
        clipping: of the gradients.
        schedulers: stepped after every batch or epoch, according to their interval.
        rate: the configured rate, to which groups of other rates keep their ratio; None for that
            of the first group.

    Attributes:
        schedulers: as given.
        box: bounds of every parameter, or None.
        scheduled: settings of every group in this round besides the learning rate, by the schedule
            of the run, such as the momentum of OneCycleLR.
    """

    box: tuple[float, float] | None = None
    scheduled: Mapping[str, Any] = {}

    def __init__(
        self,
        optimizer: Optimizer,
        clipping: Clipping | None,
        *,
        schedulers: Sequence[LRSchedulerConfig] = (),
        rate: float | None = None,
    ) -> None:
        self.optimizer, self.clipping = optimizer, clipping
        self._params = parameters_of(optimizer)
        self._trained: Sequence[Tensor] = ()  # all
        self._one = torch.ones(())
        self._new = OptimizerState(optimizer)
        self.rate: float = optimizer.param_groups[0]["lr"] if rate is None else rate
        self.schedulers = schedulers
        self._scheduler_states = [deepcopy(s.scheduler.state_dict()) for s in schedulers]
        self._counts = {"step": 0, "epoch": 0}  # of the session, for schedulers of a frequency
        self._row, self._values = torch.empty(0), list[Tensor]()
        self._proximal: Proximal | None = None
        self._anchors: Params = []  # of the pull, as the parameters
        self._decays: Params = []  # likewise
        self._flat: Tensor | None = None  # gradients as a row, for a hook
        self._parts: Params = []  # of it

    def reset(self, lr: float | None, row: Tensor, proximal: Proximal | None) -> None:
        """Start a new session: clear all state but what `proximal` carries.

        `lr` None keeps the optimiser's own rate. The parameters are views of `row` (P,).
        """
        self._row, self._proximal, self._flat, self._trained = row, proximal, None, ()
        self._values = [p.detach() for p in self._params]
        self._anchors = []
        if proximal is not None and proximal.gamma:
            self._anchors = views_at(self._values, row, proximal.anchor)
        self._decays = []
        if proximal is not None and proximal.decay is not None:
            self._decays = views_at(self._values, row, proximal.decay)
        self._new.restore()
        groups = self.optimizer.param_groups
        rates = [rate_of(group["lr"], self.rate, lr) for group in groups]
        if proximal is not None and proximal.momentum is not None:
            self._load(proximal.momentum)
            if lr is None and not self.schedulers:
                rates = [group["lr"] for group in groups]  # what it has made of its own rate
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            if lr is not None:
                group.update(self.scheduled)
        for config, state in zip(self.schedulers, self._scheduler_states, strict=True):
            config.scheduler.load_state_dict(deepcopy(state))
        self._counts = {"step": 0, "epoch": 0}

    def train_only(self, parameters: Sequence[Tensor]) -> None:
        """Freeze all other parameters, with their optimiser state, until the next call or session.

        A UserError if the optimiser moves all parameters at once.
        """
        self._trained = tuple(parameters)

    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        """One update from a scalar loss; the hook may change the gradient (P,) before clipping."""
        self._backward(loss)
        if hook is not None or self._anchors or self._decays or self.clipping is not None:
            self._adjust(hook)
        self.optimizer.step()
        for p in self._params:
            p.grad = None
        if self.schedulers:
            self.schedule("step")

    def skip(self) -> None:
        """A batch has no loss: only schedulers go on, as in Lightning."""
        if self.schedulers:
            self.schedule("step")

    def _backward(self, loss: Tensor) -> None:
        """loss.backward() without its Python overhead, a tenth of a small model's step."""
        if self._one.dtype != loss.dtype or self._one.device != loss.device:
            self._one = torch.ones((), dtype=loss.dtype, device=loss.device)
        scalar = loss if loss.dim() == 0 else loss.reshape(())
        run_backward(
            (scalar,), (self._one,), False, False, self._trained, True, accumulate_grad=True
        )

    def finish(self) -> None:
        """Called after the session: the row must then hold the model."""
        if self._proximal is None or not self._proximal.carries:
            return
        state, slots = self.optimizer.state, self.slots
        if slots is None:
            self._proximal.momentum = self._new.saved()
            return
        if not slots or not any(state.values()):
            return
        momentum = self._row.new_zeros(len(slots) * len(self._row))
        for name, p, part in self._state(slots, momentum):
            if (value := state[p].get(name)) is not None:
                part.copy_(value)
        self._proximal.momentum = momentum

    @cached_property
    def slots(self) -> dict[str, bool] | None:
        """The parts of the optimiser's state, as of `flat_slots`; None if it keeps other things."""
        return flat_slots(self.optimizer)

    def _load(self, momentum: Tensor) -> None:
        """Continue with what a client's last session has left."""
        slots = self.slots
        if slots is None:
            self._new.load(momentum)
            return
        for name, p, part in self._state(slots, momentum.clone()):
            value = part if slots[name] else part.flatten()[0].cpu()
            self.optimizer.state[p][name] = value

    def _state(
        self, slots: Mapping[str, bool], momentum: Tensor
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Each part's name, each parameter, and its place in what is carried."""
        rows = momentum.view(-1, len(self._row))
        for name, row in zip(slots, rows, strict=True):
            for p, part in zip(self._params, views_at(self._params, self._row, row), strict=True):
                yield name, p, part

    def schedule(self, interval: str) -> None:
        """Called after a "step", and by a session after an "epoch".

        Lightning counts the steps of an epoch, for schedulers of a frequency.
        """
        self._counts[interval] += 1
        for config in self.schedulers:
            if config.interval == interval and self._counts[interval] % config.frequency == 0:
                config.scheduler.step()  # type: ignore[call-arg]
        if interval == "epoch":
            self._counts["step"] = 0

    def _gradients(self) -> tuple[list[int], Params]:
        """Positions of the parameters in the last loss, and their gradients."""
        found = {i: p.grad for i, p in enumerate(self._params) if p.grad is not None}
        return [*found], [*found.values()]

    @torch.no_grad()
    def _adjust(self, hook: GradientHook | None) -> None:
        """Pass the gradients through the hook, the pull, clipping and the decay."""
        used, grads = self._gradients()
        if hook is None:
            grads = separate(grads)
        else:
            if self._flat is None:
                self._flat = torch.zeros_like(self._row)
                self._parts = views_at(self._values, self._row, self._flat)
            if len(used) < len(self._parts):
                self._flat.zero_()
            parts = [self._parts[i] for i in used]
            torch._foreach_copy_(parts, grads)
            hook(self._flat)
            grads = parts
        if self._anchors and self._proximal is not None:
            values, anchors = ([part[i] for i in used] for part in (self._values, self._anchors))
            away = torch._foreach_sub(values, anchors)
            torch._foreach_add_(grads, away, alpha=self._proximal.gamma)
        if self.clipping is not None:
            self.clipping(grads, used)
        if self._decays:
            values, decays = ([part[i] for i in used] for part in (self._values, self._decays))
            torch._foreach_addcmul_(grads, values, decays)
        for i, grad in zip(used, grads, strict=True):
            self._params[i].grad = grad


@dataclass(frozen=True)
class Steps:
    """How the sessions of a group take their steps.

    Attributes:
        stepper: Of sessions that are no Lightning fits.
        takes_lr: The optimizer uses the learning rate of the round.
        configure: Makes the optimizers and schedulers of a session that is a Lightning fit, with
            the learning rate of the round; None for other sessions.
        reason: Why sessions are Lightning fits; empty if they are not.
    """

    stepper: Stepper
    takes_lr: bool
    configure: Callable[[float | None], tuple[list[Optimizer], list[LRSchedulerConfig]]] | None
    reason: str = ""


def rate_of(own: float, configured: float, lr: float | None) -> float:
    """A parameter group's learning rate in a round of rate `lr`; None keeps its own."""
    return own if lr is None else lr if own == configured else own * (lr / configured)


def make_stepper(
    optimizer: Optimizer,
    *,
    schedulers: Sequence[LRSchedulerConfig],
    clipping: Clipping | None,
    trainable: Sequence[Tensor] | None = None,
    rate: float | None = None,
) -> Stepper:
    """The stepper of an optimiser: its own, as ASPG's, or that of any other.

    `trainable` are the live module's parameters; the optimizer's may differ, also in order.
    """
    own: Any = getattr(optimizer, "stepper", None)
    if own is None:
        return Stepper(optimizer, clipping, schedulers=schedulers, rate=rate)
    name = type(optimizer).__name__
    params = [p for group in optimizer.param_groups for p in group["params"]]
    all_of_them = trainable is None or [id(p) for p in trainable] == [id(p) for p in params]
    plain = not (schedulers or hooked(optimizer)) and len(optimizer.param_groups) == 1
    found = f"{name} with a scheduler, hooks, groups or a part of the parameters"
    require(plain and all_of_them, "model.optimizer", found, "give it all of them, and no more")
    stepper: Stepper = own(optimizer, clipping)
    return stepper


def hooked(optimizer: Optimizer) -> bool:
    """Whether its steps, or the gradients that a backward pass accumulates for it, call hooks."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params)
