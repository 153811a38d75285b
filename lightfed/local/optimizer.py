"""Steppers, which take the optimizer steps of a local session.

An optimizer is created once for each live module, and put back to its first state for every
session: in most papers momentum does not survive a round. Where it does, `Proximal` carries the
state to the client's next session.
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
from torch.optim import SGD, Optimizer

from lightfed.state.optimizer_state import OptimizerState, flat_slots, parameters_of
from lightfed.utils.errors import UserError
from lightfed.utils.torch_private import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

# What Tensor.backward calls. The name is private; a test and the pinned versions of torch guard it.
run_backward = Variable._execution_engine.run_backward

# Index of the network of all parameters that no module names.
_REMAINING = -1

Params = list[Tensor]
GradientHook = Callable[[Tensor], None]


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping, as the Trainer configures it.

    Attributes:
        limit: The largest absolute value of an element, or the largest norm.
        algorithm: What is limited: the "norm" of all gradients, each "value", or the norm of each
            "network".
        networks: For "network", the index of each parameter's network; empty for a single one.
    """

    limit: float
    algorithm: str = "norm"
    networks: tuple[int, ...] = ()

    def __call__(self, grads: Params, used: Sequence[int]) -> None:
        """Clip gradients in place.

        Args:
            grads: Gradients of the parameters that the loss depends on.
            used: Positions of these parameters among all parameters of the optimizer.
        """
        if self.algorithm == "value":
            torch._foreach_clamp_min_(grads, -self.limit)
            torch._foreach_clamp_max_(grads, self.limit)
            return
        if not self.networks:
            self._scale(grads)
            return

        grads_of_network: dict[int, Params] = {}
        for position, grad in zip(used, grads, strict=True):
            network = self.networks[position]
            grads_of_network.setdefault(network, []).append(grad)
        for grads_to_scale in grads_of_network.values():
            self._scale(grads_to_scale)

    def of(self, module: nn.Module, optimizer: Optimizer) -> "Clipping":
        """Return this clipping for an optimizer over a module's parameters.

        A module can name parts to clip as separate networks, as `clipped_separately`. The remaining
        parameters form one more network.
        """
        if self.algorithm != "network":
            return self

        prefixes = []
        for path, part in module.named_modules():
            for name in getattr(part, "clipped_separately", ()):
                prefixes.append(f"{path}.{name}.".lstrip("."))

        network_of = {}
        for name, parameter in module.named_parameters():
            network_of[id(parameter)] = _REMAINING
            for index, prefix in enumerate(prefixes):
                if name.startswith(prefix):
                    network_of[id(parameter)] = index
                    break

        networks = [network_of.get(id(p), _REMAINING) for p in parameters_of(optimizer)]
        return replace(self, networks=tuple(networks))

    def _scale(self, grads: Params) -> None:
        """Scale gradients to the limit of their common norm, if it is larger."""
        norm = nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, torch.clamp(self.limit / (norm + 1e-6), max=1.0))


@dataclass(eq=False)
class Proximal:
    """What a session's optimizer gets from the method: a pull, a decay and a state to start from.

    The pull towards a model adds gamma (w - anchor) to the gradient.

    Attributes:
        anchor: Parameters of that model, of shape (P,).
        gamma: Weight of the pull; 0 for none.
        carries: Whether the optimizer stores its final state in `momentum`. It starts from
            `momentum` wherever there is one.
        momentum: The state of the optimizer; None for none. Usually the state consists of S tensors
            for each parameter, such as SGD's buffer. They are laid out as (S P,), with 0 for
            parameters without a gradient so far. For an accelerated optimizer it is the offset of
            its first point from the parameters, (P,). For one that keeps anything else, such as
            factors of other shapes or a counter of its own, it is the bytes of its whole state.
        decay: Weights of a decay, of shape (P,); None for none. The weights times the parameters
            are added to the gradient after clipping.
    """

    anchor: Tensor
    gamma: float
    carries: bool = False
    momentum: Tensor | None = None
    decay: Tensor | None = None


def views_at(values: Params, row: Tensor, other: Tensor) -> Params:
    """Return views of `other` at the positions that `values`, views of `row`, have in `row`."""
    views = []
    for value in values:
        start = (value.data_ptr() - row.data_ptr()) // row.element_size()
        views.append(other[start : start + value.numel()].view(value.shape))
    return views


def separate(grads: Params) -> Params:
    """Return gradients that can be changed in place, as copies where they share memory.

    Autograd gives all terms of a sum the same tensor. The gradient of a loss that is a parameter is
    the seed of the backward pass.
    """
    separate_grads: Params = []
    memory_in_use: set[int] = set()
    for grad in grads:
        memory = grad.untyped_storage().data_ptr()
        is_shared = memory in memory_in_use or 0 in grad.stride() or grad.numel() == 1
        memory_in_use.add(memory)
        if is_shared:
            grad = grad.clone(memory_format=torch.contiguous_format)
        separate_grads.append(grad)
    return separate_grads


class Stepper:
    """Updates a row from the loss of a batch, by an optimizer of torch; clips gradients.

    Args:
        optimizer: As it was made. Every session begins with it as it is now.
        clipping: Clipping of the gradients; None for none.
        schedulers: Stepped after every batch or epoch, according to their interval.
        rate: The configured learning rate. Parameter groups with other rates keep their ratio to
            it. None for the rate of the first group.

    Attributes:
        schedulers: As given.
        box: Bounds that steppers with a projection keep every parameter in; None for none.
        scheduled: Settings of every parameter group in this round besides the learning rate, by the
            schedule of the run, such as the momentum of OneCycleLR.
        keeps_gradients: Whether gradients have to lie in `grad` for a while, where code that is not
            of this package could look for them.
    """

    box: tuple[float, float] | None = None
    keeps_gradients: bool = True
    scheduled: Mapping[str, Any] = {}

    def __init__(
        self,
        optimizer: Optimizer,
        clipping: Clipping | None,
        *,
        schedulers: Sequence[LRSchedulerConfig] = (),
        rate: float | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.clipping = clipping
        self.schedulers = schedulers
        self.rate: float = optimizer.param_groups[0]["lr"] if rate is None else rate
        self._params = parameters_of(optimizer)
        self._all_parameters = tuple(self._params)
        self._state = OptimizerState(optimizer)
        self._initial_schedules = [deepcopy(s.scheduler.state_dict()) for s in schedulers]
        self._seed_of_backward = torch.ones(())

        # Of a session.
        self._steps_done = {"step": 0, "epoch": 0}  # for schedulers with a frequency
        self._takes_plain_steps = False
        self._takes_direct_steps = False
        self._trained: Sequence[Tensor] = ()  # empty for all
        self._row = torch.empty(0)
        self._values: Params = []
        self._proximal: Proximal | None = None
        self._anchors: Params = []  # of the pull, one for each parameter
        self._decays: Params = []  # likewise
        self._flat_gradient: Tensor | None = None  # in the order of the row, for a hook
        self._views_of_flat: Params = []

    def reset(self, lr: float | None, row: Tensor, proximal: Proximal | None) -> None:
        """Start a new session, without any state but what `proximal` carries.

        Args:
            lr: Learning rate of the round; None for the optimizer's own.
            row: The values that are trained, of shape (P,). The parameters are views of it.
            proximal: A pull, a decay and a state to start from; None for none.
        """
        self._row = row
        self._proximal = proximal
        self._flat_gradient = None
        self._trained = ()
        self._values = [p.detach() for p in self._params]
        self._anchors = []
        if proximal is not None and proximal.gamma:
            self._anchors = views_at(self._values, row, proximal.anchor)
        self._decays = []
        if proximal is not None and proximal.decay is not None:
            self._decays = views_at(self._values, row, proximal.decay)

        self._state.restore()
        param_groups = self.optimizer.param_groups
        rates = [rate_of(group["lr"], self.rate, lr) for group in param_groups]
        if proximal is not None and proximal.momentum is not None:
            self._load(proximal.momentum)
            if lr is None and not self.schedulers:
                # An optimizer may change its own rate, as Prodigy does: it goes on with that.
                rates = [group["lr"] for group in param_groups]
        for group, rate in zip(param_groups, rates, strict=True):
            group["lr"] = rate
            if lr is not None:
                group.update(self.scheduled)

        for config, state in zip(self.schedulers, self._initial_schedules, strict=True):
            config.scheduler.load_state_dict(deepcopy(state))
        self._steps_done = {"step": 0, "epoch": 0}
        self._takes_plain_steps = not self.schedulers and is_plain_sgd(self.optimizer)
        adjusts = bool(self._anchors or self._decays) or self.clipping is not None
        self._takes_direct_steps = (
            self._takes_plain_steps
            and not adjusts
            and not self.keeps_gradients
            and all(p.requires_grad for p in self._params)  # torch returns no others
        )

    def train_only(self, parameters: Sequence[Tensor]) -> None:
        """Freeze all other parameters, with their optimizer state, until the next call or session.

        Raises:
            UserError: In steppers that move all parameters at once.
        """
        self._trained = tuple(parameters)

    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        """Take one step.

        Args:
            loss: A tensor with one element.
            hook: Can change the gradient, of shape (P,), before clipping; None for none.
        """
        if self._takes_direct_steps and hook is None:
            self._direct_step(loss)
            return

        self._backward(loss)
        if hook is not None or self._anchors or self._decays or self.clipping is not None:
            self._adjust_gradients(hook)
        if self._takes_plain_steps:
            self._plain_step()
        else:
            self.optimizer.step()
        for p in self._params:
            p.grad = None
        if self.schedulers:
            self.schedule("step")

    def _plain_step(self) -> None:
        """Do what the step of plain SGD does, without its Python overhead.

        That is a fifth of the step of a small model. The operations are those of torch's SGD.
        """
        grads = []
        for p in self._params:
            if p.grad is None or p.grad.is_sparse:
                self.optimizer.step()
                return
            grads.append(p.grad)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            torch._foreach_add_(self._values, grads, alpha=-learning_rate)

    def _direct_step(self, loss: Tensor) -> None:
        """Do the same with gradients that were never in `grad`: a twentieth of a small step."""
        parameters = self._trained or self._all_parameters
        values = [p.detach() for p in self._trained] if self._trained else self._values
        grads = self._backward(loss, parameters)
        if all(grad is not None and not grad.is_sparse for grad in grads):
            learning_rate = self.optimizer.param_groups[0]["lr"]
            torch._foreach_add_(values, grads, alpha=-learning_rate)
            return

        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        self.optimizer.step()
        for p in parameters:
            p.grad = None

    def skip(self) -> None:
        """Pass over a batch without a loss: only schedulers go on, as in Lightning."""
        if self.schedulers:
            self.schedule("step")

    def _backward(self, loss: Tensor, returned: Sequence[Tensor] = ()) -> tuple[Any, ...]:
        """Do what `loss.backward()` does, without its Python overhead.

        That is a tenth of the step of a small model.

        Args:
            loss: A tensor with one element.
            returned: Parameters whose gradients are returned, None for those that the loss does not
                depend on. By default the gradients of all that are trained are added to `grad`.
        """
        seed = self._seed_of_backward
        if seed.dtype != loss.dtype or seed.device != loss.device:
            seed = torch.ones((), dtype=loss.dtype, device=loss.device)
            self._seed_of_backward = seed
        scalar = loss if loss.dim() == 0 else loss.reshape(())
        inputs = returned or self._trained
        grads: tuple[Any, ...] = run_backward(
            (scalar,), (seed,), False, False, inputs, True, accumulate_grad=not returned
        )
        return grads

    def finish(self) -> None:
        """End a session: store the state that `proximal` carries.

        Steppers that train on another point than the row write the model into the row here.
        """
        if self._proximal is None or not self._proximal.carries:
            return
        if self.slots is None:
            self._proximal.momentum = self._state.saved()
            return

        state = self.optimizer.state
        if not self.slots or not any(state.values()):
            return
        momentum = self._row.new_zeros(len(self.slots) * len(self._row))
        for slot, parameter, part in self._parts_of_state(self.slots, momentum):
            value = state[parameter].get(slot)
            if value is not None:
                part.copy_(value)
        self._proximal.momentum = momentum

    @cached_property
    def slots(self) -> dict[str, bool] | None:
        """The tensors in the optimizer's state, by `flat_slots`; None if it keeps other things."""
        return flat_slots(self.optimizer)

    def _load(self, momentum: Tensor) -> None:
        """Go on with the state that a client's last session has left."""
        if self.slots is None:
            self._state.load(momentum)
            return
        for slot, parameter, part in self._parts_of_state(self.slots, momentum.clone()):
            has_shape_of_parameter = self.slots[slot]
            value = part if has_shape_of_parameter else part.flatten()[0].cpu()
            self.optimizer.state[parameter][slot] = value

    def _parts_of_state(
        self, slots: Mapping[str, bool], momentum: Tensor
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each slot with each parameter, and the part of `momentum` that belongs to both."""
        rows = momentum.view(-1, len(self._row))
        for slot, row in zip(slots, rows, strict=True):
            parts = views_at(self._params, self._row, row)
            for parameter, part in zip(self._params, parts, strict=True):
                yield slot, parameter, part

    def schedule(self, interval: str) -> None:
        """Step the schedulers after a "step" or an "epoch"; sessions call it after an epoch.

        As in Lightning, the steps of an epoch are counted for schedulers with a frequency.
        """
        self._steps_done[interval] += 1
        for config in self.schedulers:
            is_due = self._steps_done[interval] % config.frequency == 0
            if config.interval == interval and is_due:
                config.scheduler.step()  # type: ignore[call-arg]
        if interval == "epoch":
            self._steps_done["step"] = 0

    def _gradients(self) -> tuple[list[int], Params]:
        """Return the positions of the parameters that the loss depends on, and their gradients."""
        used = []
        grads: Params = []
        for position, parameter in enumerate(self._params):
            if parameter.grad is not None:
                used.append(position)
                grads.append(parameter.grad)
        return used, grads

    @torch.no_grad()
    def _adjust_gradients(self, hook: GradientHook | None) -> None:
        """Pass the gradients through the hook, the pull, clipping and the decay, in this order."""
        used, grads = self._gradients()
        grads = separate(grads) if hook is None else self._hooked(hook, used, grads)

        if self._anchors and self._proximal is not None:
            values = [self._values[i] for i in used]
            anchors = [self._anchors[i] for i in used]
            differences = torch._foreach_sub(values, anchors)
            torch._foreach_add_(grads, differences, alpha=self._proximal.gamma)
        if self.clipping is not None:
            self.clipping(grads, used)
        if self._decays:
            values = [self._values[i] for i in used]
            decays = [self._decays[i] for i in used]
            torch._foreach_addcmul_(grads, values, decays)

        for i, grad in zip(used, grads, strict=True):
            self._params[i].grad = grad

    def _hooked(self, hook: GradientHook, used: Sequence[int], grads: Params) -> Params:
        """Lay gradients out in the order of the row, call a hook on them, and return the views."""
        if self._flat_gradient is None:
            self._flat_gradient = torch.zeros_like(self._row)
            self._views_of_flat = views_at(self._values, self._row, self._flat_gradient)
        if len(used) < len(self._views_of_flat):
            self._flat_gradient.zero_()
        views = [self._views_of_flat[i] for i in used]
        torch._foreach_copy_(views, grads)
        hook(self._flat_gradient)
        return views


@dataclass(frozen=True)
class Steps:
    """How the sessions of a group take their steps.

    Attributes:
        stepper: Takes the steps, unless sessions are fits of Lightning.
        takes_lr: Whether the optimizer uses the learning rate of the round.
        configure: Makes the optimizers and schedulers of a session that is a fit of Lightning, with
            the learning rate of the round; None for other sessions.
        reason: Why sessions are fits of Lightning; empty if they are not.
    """

    stepper: Stepper
    takes_lr: bool
    configure: Callable[[float | None], tuple[list[Optimizer], list[LRSchedulerConfig]]] | None
    reason: str = ""


def rate_of(own: float, configured: float, lr: float | None) -> float:
    """Return the learning rate of a parameter group in a round.

    Args:
        own: Rate of the group as it was made.
        configured: The configured rate, to which groups with other rates keep their ratio.
        lr: Rate of the round; None keeps the group's own.
    """
    if lr is None:
        return own
    if own == configured:
        return lr
    return own * (lr / configured)


def make_stepper(
    optimizer: Optimizer,
    *,
    schedulers: Sequence[LRSchedulerConfig],
    clipping: Clipping | None,
    trainable: Sequence[Tensor] | None = None,
    rate: float | None = None,
) -> Stepper:
    """Return the stepper of an optimizer: one that it brings, such as ASPG's, or the general one.

    Args:
        optimizer: The optimizer.
        schedulers: Its schedulers.
        clipping: Clipping of the gradients; None for none.
        trainable: Parameters of the live module, to be compared with the optimizer's; None if the
            optimizer is known to have them all.
        rate: The configured learning rate.

    Raises:
        UserError: The optimizer brings a stepper, and has a scheduler, hooks, several groups or
            not all of the trainable parameters, which such steppers do not support.
    """
    bring_stepper: Any = getattr(optimizer, "stepper", None)
    if bring_stepper is None:
        return Stepper(optimizer, clipping, schedulers=schedulers, rate=rate)

    trains_all = True
    if trainable is not None:
        trains_all = [id(p) for p in trainable] == [id(p) for p in parameters_of(optimizer)]
    has_one_group = len(optimizer.param_groups) == 1
    if schedulers or hooked(optimizer) or not has_one_group or not trains_all:
        raise UserError(
            "model.optimizer",
            f"{type(optimizer).__name__} with a scheduler, hooks, groups or a part of the "
            "parameters",
            "give it all of them, and no more",
        )
    stepper: Stepper = bring_stepper(optimizer, clipping)
    return stepper


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Whether a step is w - lr grad for all parameters, and nobody listens to it.

    The step of a client alone, and that of a pack, then do without torch's optimizer.
    """
    if type(optimizer) is not SGD or len(optimizer.param_groups) != 1:
        return False
    settings = optimizer.param_groups[0]
    does_more = (
        settings["momentum"]
        or settings["weight_decay"]
        or settings["maximize"]
        or settings["differentiable"]
        or settings["fused"]
    )
    is_replaced = "step" in vars(optimizer)  # as by a callback that counts steps
    has_a_number_as_rate = isinstance(settings["lr"], float | int)
    return has_a_number_as_rate and not (does_more or is_replaced or hooked(optimizer))


def hooked(optimizer: Optimizer) -> bool:
    """Whether an optimizer's steps, or the accumulation of its gradients, call hooks."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return True
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters_of(optimizer))
