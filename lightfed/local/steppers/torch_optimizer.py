"""Any optimiser of torch, and the choice of the cheapest stepper for an optimiser."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightfed.local.optimizer import Clipping, GradientHook, Params, Proximal, Stepper
from lightfed.local.steppers.sgd import SGDStepper
from lightfed.utils.errors import UserError, require


class OptimizerStepper(Stepper):
    """Any torch optimiser, with its schedulers and one loss scaler per session.

    The schedulers are stepped after every batch or epoch, according to their interval. `scaler`
    makes a new GradScaler; one shared by all clients would depend on their placement. `rate` is the
    configured learning rate: parameter groups of other rates keep their ratio to the round's. By
    default it is that of the first group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        schedulers: list[LRSchedulerConfig],
        clipping: Clipping | None,
        scaler: Callable[[], torch.amp.GradScaler] | None,
        rate: float | None = None,
    ) -> None:
        super().__init__(clipping)
        self._optimizer = optimizer
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._trained: Sequence[Tensor] | None = None  # all
        self._groups = [
            {k: deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups
        ]
        self._rate = self._groups[0]["lr"] if rate is None else rate
        self._schedulers = schedulers
        self._scheduler_states = [deepcopy(s.scheduler.state_dict()) for s in schedulers]
        self._make_scaler = scaler
        self._counts = {"step": 0, "epoch": 0}  # of the session, for schedulers of a frequency
        self._scaler: torch.amp.GradScaler | None = None
        self._carries = False

    @override
    def reset(
        self, lr: float | None, values: Params, row: Tensor, proximal: Proximal | None
    ) -> None:
        self._begin(self._params, row, proximal)
        self._carries = proximal is not None and proximal.carries
        self._trained = None
        self._optimizer.state.clear()
        for group, initial in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(deepcopy(initial))
            own = group["lr"]
            if lr is not None:
                group["lr"] = lr if own == self._rate else own * (lr / self._rate)
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
            raise cannot_carry(type(self._optimizer).__name__)

    def _schedule(self, interval: str) -> None:
        self._counts[interval] += 1
        for config in self._schedulers:
            if config.interval == interval and self._counts[interval] % config.frequency == 0:
                config.scheduler.step()  # type: ignore[call-arg]

    @torch.no_grad()
    def _adjust(self, hook: GradientHook | None) -> None:
        used = [i for i, p in enumerate(self._params) if p.grad is not None]
        grads = [g for i in used if (g := self._params[i].grad) is not None]
        adjusted = self._adjusted(grads, used, hook)
        if hook is not None:
            torch._foreach_copy_(grads, adjusted)


def cannot_carry(name: str) -> UserError:
    """An algorithm carries the momentum of an optimiser whose state ends with a session."""
    fix = (
        "use ASPG, or torch.optim.SGD in 32 or bf16-mixed without a scheduler; or set "
        "model.algorithm.init_args.momentum: session"
    )
    return UserError("model.optimizer", f"{name}, whose state ends with a session", fix)


def make_stepper(
    optimizer: Optimizer,
    *,
    schedulers: list[LRSchedulerConfig],
    clipping: Clipping | None,
    scaler: Callable[[], torch.amp.GradScaler] | None,
    trainable: Sequence[Tensor] | None = None,
    factors: Sequence[float] | None = None,
    rate: float | None = None,
) -> Stepper:
    """The cheapest stepper that does exactly what `optimizer` would.

    `trainable` are the live module's parameters; the optimizer's may differ, also in order.
    `factors` are those of every parameter's learning rate, only for torch.optim.SGD. `rate` as of
    `OptimizerStepper`.
    """
    own = getattr(optimizer, "stepper", None)
    group = optimizer.param_groups[0]
    name, listened = type(optimizer).__name__, hooked(optimizer)
    found, fix = f"{name}, with hooks of its steps or gradients", "use Tensor.register_hook"
    require(not listened or (own is None and factors is None), "model.optimizer", found, fix)
    plain = (
        type(optimizer) is SGD
        and len(optimizer.param_groups) == 1
        and not schedulers
        and scaler is None
        and all(p.requires_grad for p in group["params"])
        and (trainable is None or [id(p) for p in trainable] == [id(p) for p in group["params"]])
        and not any(group.get(k) for k in ("maximize", "differentiable", "fused"))
        and not isinstance(group["lr"], Tensor)
        and not listened
    )
    found = f"{name}, but a part has its own learning rate"
    fix = "use torch.optim.SGD, in 32 or bf16-mixed"
    require(plain or factors is None, "model.optimizer", found, fix)
    if own is not None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        all_of_them = trainable is None or [id(p) for p in trainable] == [id(p) for p in params]
        alone = not schedulers and len(optimizer.param_groups) == 1 and all_of_them
        found = f"{name} with a scheduler, groups or a part of the parameters"
        fix = "return it alone, with all of them: configure_optimizers"
        require(alone, "model.clients", found, fix)
        found = f"16-mixed, and {name} does not support loss scaling"
        require(scaler is None, "trainer.precision", found, "use bf16-mixed or 32")
        stepper: Stepper = own(clipping)
    elif plain:
        stepper = SGDStepper(group["params"], group, clipping, factors)
    else:
        stepper = OptimizerStepper(
            optimizer, schedulers=schedulers, clipping=clipping, scaler=scaler, rate=rate
        )
    if not (schedulers or scaler or listened):
        stepper.optimizer, stepper.rate = optimizer, rate
    return stepper


def hooked(optimizer: Optimizer) -> bool:
    """Whether its steps, or the gradients that a backward pass accumulates for it, call hooks."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params)
