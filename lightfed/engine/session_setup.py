"""Precision, clipping and optimisers of local sessions, as configured."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightfed.lightning_fits.lightning_fit import Configure, Configured
from lightfed.lightning_fits.session_trainer import Position, SessionHost, SessionTrainer
from lightfed.local.client_group import GroupState
from lightfed.local.optimizer import Clipping, Stepper, Steps, hooked, make_stepper, rate_of
from lightfed.local.session import Runtime
from lightfed.state.optimizer_state import settings_of
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.lightning_private import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
    is_overridden,
)

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
    *,
    keep: bool = False,
) -> Steps:
    """How a group's sessions take their steps: with their module's own optimizer, or the run's.

    Args:
        state: The group.
        position: Among the groups.
        factory: Of the configured optimizer; None if modules have their own.
        runtime: Precision and clipping.
        lr_factors: Of parts of the module, by name prefix.
        keep: A client's optimizer goes on from session to session.

    Raises:
        UserError: a session cannot use the optimizer.
    """
    key = f"model.clients.{position}.model"
    own = is_overridden("configure_optimizers", state.module)
    if own:
        configure: Configure = partial(_own_optimizers, state.module, key)
    else:
        configure = partial(_run_optimizers, state, key, factory, lr_factors)
    trainer = state.trainer
    with nullcontext() if trainer is None else trainer.configuring():
        optimizers, schedulers = configure(None)
        counted = trainer is not None and trainer.counted
    _check_optimizers(optimizers, schedulers, state, key, runtime)
    if trainer is not None:
        trainer.set_optimizers(optimizers, schedulers)
    stepper = _stepper(state, optimizers, schedulers, runtime, own=own, factory=factory)
    # Schedulers go on with their optimizer; those that count the steps of a session are its own.
    why = state.table.reason
    if not why and counted:
        why = counting(state.module)
    if not why and keep and schedulers:
        why = "its scheduler goes on from session to session"
    if not why:
        return Steps(stepper, not own, None)
    name = type(optimizers[0]).__name__
    found = f"{name}, which takes its steps itself, and {why}"
    steps = hasattr(optimizers[0], "stepper")
    require(not steps, "model.optimizer", found, "name another optimizer, such as SGD")
    if trainer is None:
        state.trainer = SessionTrainer(state.module, SessionHost(device=state.store.device))
    if trainer is not None:
        configured = optimizers, schedulers
        configure = _FirstOnce(configure, configured, trainer.position if counted else None)
    return Steps(stepper, not own, configure, why)


class _FirstOnce:
    """Gives the first session the optimizers that have been configured before it, unchanged.

    A module's `configure_optimizers` is so called once for each session, as in Lightning.

    Args:
        configure: Makes those of the other sessions.
        configured: The optimizers and schedulers, which no session has used.
        position: Of the session that they are for; None if they fit any.
    """

    def __init__(
        self, configure: Configure, configured: Configured, position: Position | None
    ) -> None:
        self._configure = configure
        self._configured: Configured | None = configured
        self._position = position
        self._expected = None if position is None else replace(position)

    def __call__(self, lr: float | None) -> Configured:
        configured, self._configured = self._configured, None
        fits = self._position is None or self._expected == replace(self._position, active=False)
        if configured is None or lr is not None or not fits:
            return self._configure(lr)
        return configured


def counting(module: L.LightningModule) -> str:
    """Why each session of a module configures its optimizers anew."""
    return f"configure_optimizers of {type(module).__name__} asks for the session's length"


def _own_optimizers(module: L.LightningModule, key: str, lr: float | None) -> Configured:
    """What a module's own `configure_optimizers` returns."""
    try:
        configured: Any = module.configure_optimizers()
    except UserError:
        raise
    except Exception as error:
        found = f"configure_optimizers of {type(module).__name__}: {reason(error)}"
        raise UserError(key, found, "correct it") from error
    try:
        optimizers, schedulers, monitor = _configure_optimizers(configured)
        if module.automatic_optimization:
            return optimizers, _configure_schedulers_automatic_opt(schedulers, monitor)
        return optimizers, _configure_schedulers_manual_opt(schedulers)
    except MisconfigurationException as error:
        found = f"a {type(configured).__name__} from configure_optimizers"
        raise UserError(key, found, "return an optimizer, and with it a scheduler") from error


def _run_optimizers(
    state: GroupState,
    key: str,
    factory: OptimizerFactory | None,
    lr_factors: Mapping[str, float],
    lr: float | None,
) -> Configured:
    """The configuration's optimizer, with the learning rate of the round."""
    if factory is None:
        raise UserError("model.optimizer", "nothing", "name one: class_path: torch.optim.SGD")
    trains = bool(state.live.trainable)
    require(trains, key, "it has no parameters to train", "use another model")
    optimizer = make_optimizer(factory, [*state.live.trainable])
    rate = _configured_rate(optimizer)
    if lr_factors:
        optimizer = make_optimizer(factory, _parameters(state, rate, lr_factors))
    for group in optimizer.param_groups:
        group["lr"] = rate_of(group["lr"], rate, lr)
    return [optimizer], []


def _check_optimizers(
    optimizers: list[Optimizer],
    schedulers: list[LRSchedulerConfig],
    state: GroupState,
    key: str,
    runtime: Runtime,
) -> None:
    """Refuse optimizers that no session can use."""
    module = state.module
    name, manual = type(module).__name__, not module.automatic_optimization
    found = f"{len(optimizers)} optimizers from configure_optimizers"
    fix = "return one, whose parameter groups may have rates of their own, or optimise manually"
    require(manual or len(optimizers) == 1, key, found, fix)
    require(bool(optimizers), key, found, "return at least one")
    for optimizer in optimizers:
        _check_parameters(optimizer, key, module)
    plateau = any(config.reduce_on_plateau for config in schedulers)
    fix = "a session has no metric to monitor; use a schedule of steps"
    require(not plateau, key, "a ReduceLROnPlateau scheduler", fix)
    found = f"given, and {name} optimises manually"
    fix = "leave it out, and clip in training_step by self.clip_gradients"
    require(not (manual and runtime.clipping), "trainer.gradient_clip_val", found, fix)


def _stepper(
    state: GroupState,
    optimizers: list[Optimizer],
    schedulers: list[LRSchedulerConfig],
    runtime: Runtime,
    *,
    own: bool,
    factory: OptimizerFactory | None,
) -> Stepper:
    """What steps in sessions that are no Lightning fits; the first optimizer of several."""
    optimizer = optimizers[0]
    rate = None
    if not own and factory is not None:
        rate = _configured_rate(make_optimizer(factory, [*state.live.trainable]))
    return make_stepper(
        optimizer,
        schedulers=[config for config in schedulers if config.scheduler.optimizer is optimizer],
        clipping=runtime.clipping and runtime.clipping.of(state.module, optimizer),
        trainable=state.live.trainable if own else None,
        rate=rate,
    )


def single_optimizer(
    module: L.LightningModule, factory: OptimizerFactory | None, runtime: Runtime
) -> Optimizer | str:
    """The optimiser of a module, if nothing else acts in its steps, or else what does."""
    try:
        if is_overridden("configure_optimizers", module):
            trainer = module._trainer
            if isinstance(trainer, SessionTrainer):
                with trainer.configuring():
                    configured: Any = module.configure_optimizers()
                if trainer.counted:
                    return counting(module)
            else:
                configured = module.configure_optimizers()
            (optimizer,), schedulers, _ = _configure_optimizers(configured)
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
