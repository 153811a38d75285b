"""Precision, clipping and optimisers of local sessions, as configured."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightfed.local.client_group import GroupState
from lightfed.local.optimizer import Clipping, Stepper, hooked, make_stepper
from lightfed.local.session import Runtime
from lightfed.state.optimizer_state import settings_of
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.lightning_private import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    is_overridden,
)

log = logging.getLogger(__name__)

_REHEARSED = 1000  # rounds at most

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
ScheduleFactory = Callable[[Optimizer], LRScheduler]


def runtime_of(trainer: L.Trainer, *, clips: str) -> Runtime:
    """Precision and clipping of local steps, from the Trainer's flags; `clips` as of `Clipping`."""
    plugin: Any = trainer.precision_plugin
    known = type(plugin) in (Precision, MixedPrecision)
    fix = "use 32 or bf16-mixed: clients train in float32"
    require(known, "trainer.precision", f"{plugin.precision}", fix)
    mixed = isinstance(plugin, MixedPrecision)
    limit = trainer.gradient_clip_val
    scaled, fix = mixed and plugin.scaler is not None, "use bf16-mixed or 32"
    require(not scaled, "trainer.precision", "16-mixed, whose losses would need scaling", fix)
    return Runtime(
        trainer=trainer,
        forward_context=plugin.forward_context if mixed else None,
        clipping=Clipping(float(limit), clips) if limit else None,
    )


def client_stepper(
    state: GroupState,
    position: int,
    factory: OptimizerFactory | None,
    runtime: Runtime,
    lr_factors: Mapping[str, float],
) -> tuple[Stepper, bool]:
    """A group's optimiser: its module's own, if it defines one, or the configuration's.

    `lr_factors` are those of parts of the module, by name prefix. Also returns whether the
    optimiser uses the round's learning rate.
    """
    module, key = state.module, f"model.clients.{position}.model"
    _warn_of_hooks(module)
    if is_overridden("configure_optimizers", module):
        return _own_stepper(state, key, runtime), False
    if factory is None:
        raise UserError("model.optimizer", "nothing", "name one: class_path: torch.optim.SGD")
    trains = bool(state.live.trainable)
    require(trains, key, "it has no parameters to train", "use another model")
    optimizer = make_optimizer(factory, [*state.live.trainable])
    rate = _configured_rate(optimizer)
    if lr_factors:
        optimizer = make_optimizer(factory, _parameters(state, rate, lr_factors))
    _check_parameters(optimizer, "model.optimizer", module)
    stepper = make_stepper(
        optimizer,
        schedulers=[],
        clipping=runtime.clipping and runtime.clipping.of(module, optimizer),
        rate=rate,
    )
    return stepper, True


def single_optimizer(
    module: L.LightningModule, factory: OptimizerFactory | None, runtime: Runtime
) -> Optimizer | str:
    """The optimiser of a module, if nothing else acts in its steps, or else what does."""
    try:
        if is_overridden("configure_optimizers", module):
            (optimizer,), schedulers, _ = _configure_optimizers(_configured(module, runtime))
        else:
            trained = [p for p in module.parameters() if p.requires_grad]
            optimizer, schedulers = factory(trained), []  # type: ignore[misc]
    except Exception as error:  # `client_stepper` says it in full
        return f"it has no optimiser: {reason(error)}"
    if schedulers or hooked(optimizer):
        return "its optimiser has a scheduler or hooks"
    return optimizer


def _parameters(state: GroupState, rate: float, factors: Mapping[str, float]) -> list[Any]:
    """The trainable parameters, those of one learning rate in a group."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, p in state.module.named_parameters():
        if p.requires_grad:
            own = (factor for prefix, factor in factors.items() if name.startswith(prefix))
            groups.setdefault(next(own, 1.0), []).append(p)
    return [{"params": params, "lr": rate * factor} for factor, params in groups.items()]


def template(
    factory: OptimizerFactory | None,
    schedule: ScheduleFactory | None,
    *,
    rounds: int,
    parameters: Sequence[nn.Parameter],
) -> Any:
    """The template of the clients' optimisers, as of Lightning's `configure_optimizers`.

    Its learning rate is that of the round, for LearningRateMonitor. A UserError if the schedule
    ends before so many rounds (-1: no limit), before any of them is trained. `parameters` are those
    of a client, which some optimisers look at when they are made; no step of the template moves
    them.
    """
    if factory is None:
        return []
    optimizer, rehearsed = (_detached(factory, parameters) for _ in range(2))
    if schedule is None:
        return optimizer
    rates = make_schedule(schedule, rehearsed)
    for _ in range(min(rounds - 1, _REHEARSED)):
        rehearsed.step()
        step_schedule(rates)
    return [optimizer], [make_schedule(schedule, optimizer)]


def _detached(factory: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The configuration's optimiser with its settings in one group, and without parameters.

    Its step does nothing: it only lets a schedule count.
    """
    made = make_optimizer(factory, [*parameters])
    settings = settings_of(made.param_groups[0])
    known = {name: value for name, value in made.defaults.items() if name in settings}
    settings |= known | {"lr": _configured_rate(made)}
    made.param_groups[:] = [{"params": [], **settings}]
    made.state.clear()
    vars(made)["step"] = MethodType(_no_step, made)
    return made


def _no_step(optimizer: Optimizer, closure: Any = None) -> None:
    """Replaces the step of a template."""


def scheduled_settings(template: Optimizer) -> dict[str, Any]:
    """What a schedule has made of a template's settings besides the rate, such as its momentum."""
    (group,) = template.param_groups
    return {
        name: group[name]
        for name, value in template.defaults.items()
        if name != "lr" and name in group and group[name] != value
    }


def _configured_rate(optimizer: Optimizer) -> float:
    """The rate of the configuration: groups may have others, in a ratio to it."""
    rate: float = {**optimizer.param_groups[0], **optimizer.defaults}["lr"]
    return rate


def make_optimizer(factory: OptimizerFactory, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The configuration's optimiser; a UserError if its arguments are refused."""
    try:
        return factory(parameters)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError("model.optimizer", str(error), "correct its init_args") from error


def _check_parameters(optimizer: Optimizer, key: str, module: nn.Module) -> None:
    """Reject optimisers of other parameters than the module's, or that need closures."""
    own = set(map(id, module.parameters()))
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    found = f"an optimizer of {foreign} parameters that are not those of {type(module).__name__}"
    require(not foreign, key, found, "give it the module's own parameters")
    fits = not isinstance(optimizer, LBFGS | SparseAdam)
    found = f"{type(optimizer).__name__}, which needs closures or sparse gradients"
    require(fits, key, found, "use one of dense gradients, such as Adam")


def make_schedule(factory: ScheduleFactory, optimizer: Optimizer) -> LRScheduler:
    """The configuration's rate over rounds; a UserError if it is no function of the round."""
    try:
        schedule = factory(optimizer)
    except (TypeError, ValueError) as error:
        raise UserError("model.lr_schedule", str(error), "correct its init_args") from error
    plateau, fix = isinstance(schedule, ReduceLROnPlateau), "use a function of the round"
    require(not plateau, "model.lr_schedule", "ReduceLROnPlateau", fix)
    return schedule


def step_schedule(schedule: Any) -> None:
    """Advance the schedule by one round; a UserError if it ends before the run, or cannot count."""
    try:
        schedule.step()
    except (ValueError, ZeroDivisionError) as error:
        found = f"round {schedule.last_epoch + 1}: {error}"
        raise UserError("model.lr_schedule", found, "correct its init_args") from error


# Hooks that Lightning calls in its loops but a session does not.
_UNCALLED = """
on_train_start on_train_epoch_start on_train_batch_start on_train_batch_end on_train_epoch_end
on_train_end on_before_zero_grad on_before_backward backward on_after_backward
on_before_optimizer_step on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer
optimizer_step optimizer_zero_grad configure_gradient_clipping lr_scheduler_step
"""


def _warn_of_hooks(module: L.LightningModule) -> None:
    """Warn about a module's hooks that sessions do not call."""
    uncalled = [name for name in _UNCALLED.split() if is_overridden(name, module)]
    if uncalled:
        log.warning(
            "%s: a session calls training_step, validation_step, configure_optimizers and "
            "self.log, but not %s", type(module).__name__, ", ".join(uncalled),
        )  # fmt: skip


def _configured(module: L.LightningModule, runtime: Runtime) -> Any:
    """What a module's own `configure_optimizers` returns."""
    if runtime.trainer is not None:
        module.trainer = runtime.trainer
    return module.configure_optimizers()


def _own_stepper(state: GroupState, key: str, runtime: Runtime) -> Stepper:
    module = state.module
    try:
        configured = _configured(module, runtime)
    except Exception as error:
        found = f"configure_optimizers of {type(module).__name__}: {reason(error)}"
        raise UserError(key, found, "correct it") from error
    try:
        optimizers, schedulers, monitor = _configure_optimizers(configured)
    except MisconfigurationException as error:
        found = f"a {type(configured).__name__} from configure_optimizers"
        raise UserError(key, found, "return an optimizer, and with it a scheduler") from error
    found = f"{len(optimizers)} optimizers from configure_optimizers"
    fix = "return one; parts with rates of their own are its parameter groups"
    require(len(optimizers) == 1, key, found, fix)
    _check_parameters(optimizers[0], key, module)
    configs = _configure_schedulers_automatic_opt(schedulers, monitor)
    plateau = any(config.reduce_on_plateau for config in configs)
    fix = "a session has no metric to monitor; use a schedule of steps"
    require(not plateau, key, "a ReduceLROnPlateau scheduler", fix)
    return make_stepper(
        optimizers[0],
        schedulers=configs,
        clipping=runtime.clipping and runtime.clipping.of(module, optimizers[0]),
        trainable=state.live.trainable,
    )
