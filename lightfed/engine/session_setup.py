"""Configures local sessions before the first round: precision, clipping, optimizers, schedules."""

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
from lightfed.local.group_state import GroupState
from lightfed.local.optimizer import Clipping, Stepper, Steps, hooked, make_stepper, rate_of
from lightfed.local.session import Runtime
from lightfed.state.optimizer_state import settings_of
from lightfed.utils.errors import UserError, reason
from lightfed.utils.lightning_private import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
    is_overridden,
)

# A schedule is rehearsed before the run for at most so many rounds, so that a run of millions of
# rounds still starts at once.
_MOST_REHEARSED_ROUNDS = 1000

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
ScheduleFactory = Callable[[Optimizer], LRScheduler]


def runtime_of(trainer: L.Trainer, *, clips: str) -> Runtime:
    """Return the precision and the clipping of local steps, from the flags of a Trainer.

    Args:
        trainer: The Trainer of the run.
        clips: How gradients are clipped, as for `Clipping.algorithm`.

    Raises:
        UserError: Clients cannot train in the Trainer's precision.
    """
    plugin: Any = trainer.precision_plugin
    if type(plugin) not in (Precision, MixedPrecision):
        fix = "use 32 or bf16-mixed: clients train in float32"
        raise UserError("trainer.precision", f"{plugin.precision}", fix)

    mixed = isinstance(plugin, MixedPrecision)
    if mixed and plugin.scaler is not None:
        found = "16-mixed, whose losses would need scaling"
        raise UserError("trainer.precision", found, "use bf16-mixed or 32")

    clipping = None
    if trainer.gradient_clip_val:
        clipping = Clipping(float(trainer.gradient_clip_val), clips)
    return Runtime(
        trainer=trainer,
        forward_context=plugin.forward_context if mixed else None,
        clipping=clipping,
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
    """Decide how the sessions of a group take their steps.

    They use the optimizer that their module configures, or else that of the run.

    Args:
        state: The group.
        position: The position of the group among the groups.
        factory: Makes the configured optimizer; None if the modules configure their own.
        runtime: Precision and clipping.
        lr_factors: Factors on the learning rate of parts of the module, by prefix of their names.
        keep: Whether a client's optimizer goes on from session to session.

    Raises:
        UserError: No session can use the optimizer.
    """
    key = f"model.clients.{position}.model"
    configures_its_own = is_overridden("configure_optimizers", state.module)
    if configures_its_own:
        configure: Configure = partial(_optimizers_of_module, state.module, key)
    else:
        configure = partial(_optimizers_of_run, state, key, factory, lr_factors)

    trainer = state.trainer
    with nullcontext() if trainer is None else trainer.configuring():
        optimizers, schedulers = configure(None)
        reads_position = trainer is not None and trainer.counted
    key_of_optimizer = key if configures_its_own else "model.optimizer"
    _check_optimizers(optimizers, schedulers, state, key_of_optimizer, runtime)
    if trainer is not None:
        trainer.set_optimizers(optimizers, schedulers)

    stepper = _make_stepper(
        state, optimizers, schedulers, runtime, None if configures_its_own else factory
    )
    takes_lr = not configures_its_own

    why_fits = state.table.reason
    if not why_fits and reads_position:
        why_fits = counting(state.module)
    if not why_fits and keep and schedulers:
        # A stepper puts schedulers back for every session. Here they belong to the client.
        why_fits = "its scheduler goes on from session to session"
    if not why_fits:
        return Steps(stepper, takes_lr, configure=None)

    # The sessions are Lightning fits.
    if hasattr(optimizers[0], "stepper"):
        found = f"{type(optimizers[0]).__name__}, which takes its steps itself, and {why_fits}"
        raise UserError("model.optimizer", found, "name another optimizer, such as SGD")
    if trainer is None:
        state.trainer = SessionTrainer(state.module, SessionHost(device=state.store.device))
    else:
        configure = _PreparedForFirst(
            configure, (optimizers, schedulers), trainer.position if reads_position else None
        )
    return Steps(stepper, takes_lr, configure, why_fits)


class _PreparedForFirst:
    """Gives the first session the optimizers that were made before the run, still unused.

    So a module's `configure_optimizers` is called exactly once per session, as in Lightning.

    Args:
        configure: Makes the optimizers of every other session.
        configured: The optimizers and schedulers that no session has used.
        position: The position in a session, as the Trainer of the sessions has it, if the
            optimizers were made for a session of one length; None if they suit any session.
    """

    def __init__(
        self, configure: Configure, configured: Configured, position: Position | None
    ) -> None:
        self._configure = configure
        self._configured: Configured | None = configured
        self._position = position
        # A copy, because sessions move the position of their Trainer.
        self._expected = None if position is None else replace(position)

    def __call__(self, lr: float | None) -> Configured:
        configured = self._configured
        self._configured = None

        if configured is None or lr is not None or not self._suits_session():
            return self._configure(lr)
        return configured

    def _suits_session(self) -> bool:
        """Whether the session that begins has the length for which the optimizers were made."""
        if self._position is None:
            return True
        return replace(self._position, active=False) == self._expected


def counting(module: L.LightningModule) -> str:
    """Say why each session of a module configures its optimizers anew, for messages."""
    return f"configure_optimizers of {type(module).__name__} asks for the session's length"


def _optimizers_of_module(module: L.LightningModule, key: str, lr: float | None) -> Configured:
    """Return what a module's own `configure_optimizers` makes, in Lightning's form.

    Args:
        module: The group's live module.
        key: The configuration key of the group's model, for errors.
        lr: The learning rate of the round, which such a module does not use.
    """
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


def _optimizers_of_run(
    state: GroupState,
    key: str,
    factory: OptimizerFactory | None,
    lr_factors: Mapping[str, float],
    lr: float | None,
) -> Configured:
    """Return the configuration's optimizer over a group's module, with the rate of the round.

    Args:
        state: The group.
        key: The configuration key of the group's model, for errors.
        factory: Makes the optimizer.
        lr_factors: Factors on the learning rate, by prefix of parameters' names.
        lr: The learning rate of the round; None for the configured one.
    """
    if factory is None:
        raise UserError("model.optimizer", "nothing", "name one: class_path: torch.optim.SGD")
    if not state.live.trainable:
        raise UserError(key, "it has no parameters to train", "use another model")

    optimizer = make_optimizer(factory, [*state.live.trainable])
    rate = _configured_rate(optimizer)
    if lr_factors:
        optimizer = make_optimizer(factory, _groups_by_rate(state, rate, lr_factors))
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
    """Refuse optimizers and schedulers that no session can use; `key` is where they come from."""
    module = state.module
    optimizes_manually = not module.automatic_optimization

    found = f"{len(optimizers)} optimizers from configure_optimizers"
    if len(optimizers) != 1 and not optimizes_manually:
        fix = "return one, whose parameter groups may have rates of their own, or optimize manually"
        raise UserError(key, found, fix)
    if not optimizers:
        raise UserError(key, found, "return at least one")
    for optimizer in optimizers:
        _check_parameters(optimizer, key, module)

    if any(config.reduce_on_plateau for config in schedulers):
        fix = "a session has no metric to monitor; use a schedule of steps"
        raise UserError(key, "a ReduceLROnPlateau scheduler", fix)
    if optimizes_manually and runtime.clipping:
        found = f"given, and {type(module).__name__} optimizes manually"
        fix = "leave it out, and clip in training_step by self.clip_gradients"
        raise UserError("trainer.gradient_clip_val", found, fix)


def _make_stepper(
    state: GroupState,
    optimizers: list[Optimizer],
    schedulers: list[LRSchedulerConfig],
    runtime: Runtime,
    factory: OptimizerFactory | None,
) -> Stepper:
    """Return what takes the steps of sessions that are no Lightning fits.

    Of several optimizers, as a module that optimizes manually may have, it has the first.

    Args:
        state: The group.
        optimizers: What has been configured for the group's module.
        schedulers: Their schedulers.
        runtime: Precision and clipping.
        factory: Makes the run's optimizer; None if the group's module configures its own.
    """
    optimizer = optimizers[0]
    own_schedulers = [config for config in schedulers if config.scheduler.optimizer is optimizer]

    clipping = runtime.clipping
    if clipping is not None:
        clipping = clipping.of(state.module, optimizer)

    # A module's own optimizer may leave parameters out, which not every stepper allows. The run's
    # optimizer has all of them, but parts of the module may have other rates than the configured.
    if factory is None:
        trainable = state.live.trainable
        rate = None
    else:
        trainable = None
        rate = _configured_rate(make_optimizer(factory, [*state.live.trainable]))
    return make_stepper(
        optimizer, schedulers=own_schedulers, clipping=clipping, trainable=trainable, rate=rate
    )


def single_optimizer(
    module: L.LightningModule, factory: OptimizerFactory | None, runtime: Runtime
) -> Optimizer | str:
    """Return the optimizer of a module, if nothing else acts in its steps.

    Args:
        module: The module of one or several clients.
        factory: Makes the configured optimizer; None if the module configures its own.
        runtime: Precision and clipping.

    Returns:
        The optimizer, or in words what else acts in the module's steps.
    """
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
            optimizer = factory(trained)  # type: ignore[misc]
            schedulers = []
    except Exception as error:
        # Not the place to refuse it: `client_stepper` does so, and says what to change.
        return f"it has no optimizer: {reason(error)}"

    if schedulers or hooked(optimizer):
        return "its optimizer has a scheduler or hooks"
    return optimizer


def _groups_by_rate(
    state: GroupState, rate: float, factors: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups for an optimizer, one group per learning rate.

    Args:
        state: The group of clients.
        rate: The configured rate.
        factors: Factors on it, by prefix of parameters' names. The first prefix that fits counts;
            a parameter without one has the configured rate.
    """
    params_by_factor: dict[float, list[nn.Parameter]] = {}
    for name, parameter in state.module.named_parameters():
        if not parameter.requires_grad:
            continue
        factor = 1.0
        for prefix, factor_of_prefix in factors.items():
            if name.startswith(prefix):
                factor = factor_of_prefix
                break
        params_by_factor.setdefault(factor, []).append(parameter)

    return [{"params": params, "lr": rate * factor} for factor, params in params_by_factor.items()]


def template(
    factory: OptimizerFactory | None,
    schedule: ScheduleFactory | None,
    *,
    rounds: int,
    parameters: Sequence[nn.Parameter],
) -> Any:
    """Return a template of the clients' optimizers, as Lightning's `configure_optimizers` does.

    The Trainer of the run steps it once per round. Its learning rate is that of the round, which
    sessions use and LearningRateMonitor logs; it trains nothing.

    Args:
        factory: Makes the configured optimizer; None if the clients' modules configure their own.
        schedule: Makes the configured schedule over rounds, if there is one.
        rounds: The number of rounds of the run; -1 for no limit.
        parameters: The parameters of a client, which some optimizers look at when they are made.
            No step of the template moves them.

    Raises:
        UserError: The schedule ends before the run does. This is found before the first round.
    """
    if factory is None:
        return []
    optimizer = _detached(factory, parameters)
    if schedule is None:
        return optimizer

    rehearsed = _detached(factory, parameters)
    rehearsed_schedule = make_schedule(schedule, rehearsed)
    for _ in range(min(rounds - 1, _MOST_REHEARSED_ROUNDS)):
        rehearsed.step()
        step_schedule(rehearsed_schedule)
    return [optimizer], [make_schedule(schedule, optimizer)]


def _detached(factory: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Return the configuration's optimizer with its settings in one group without parameters.

    Its `step` does nothing, and only lets a schedule count.
    """
    optimizer = make_optimizer(factory, [*parameters])

    settings = settings_of(optimizer.param_groups[0])
    for name, value in optimizer.defaults.items():
        if name in settings:
            settings[name] = value
    settings["lr"] = _configured_rate(optimizer)

    optimizer.param_groups[:] = [{"params": [], **settings}]
    optimizer.state.clear()
    vars(optimizer)["step"] = MethodType(_no_step, optimizer)
    return optimizer


def _no_step(optimizer: Optimizer, closure: Any = None) -> None:
    """Do nothing, in place of the step of a template."""


def scheduled_settings(template: Optimizer) -> dict[str, Any]:
    """Return what a schedule has changed besides the rate, such as the momentum, by name."""
    (group,) = template.param_groups
    changed = {}
    for name, configured in template.defaults.items():
        if name != "lr" and name in group and group[name] != configured:
            changed[name] = group[name]
    return changed


def _configured_rate(optimizer: Optimizer) -> float:
    """Return the rate of the configuration; parameter groups may have others, in a ratio to it."""
    rate: float
    if "lr" in optimizer.defaults:
        rate = optimizer.defaults["lr"]
    else:
        rate = optimizer.param_groups[0]["lr"]
    return rate


def make_optimizer(factory: OptimizerFactory, parameters: Iterable[Any]) -> Optimizer:
    """Make the configuration's optimizer.

    Args:
        factory: The configured optimizer.
        parameters: Parameters, or groups of them.

    Raises:
        UserError: The optimizer refuses its arguments.
    """
    try:
        return factory(parameters)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError("model.optimizer", str(error), "correct its init_args") from error


def _check_parameters(optimizer: Optimizer, key: str, module: nn.Module) -> None:
    """Refuse an optimizer of parameters that are not the module's, or one that needs closures."""
    own = {id(parameter) for parameter in module.parameters()}
    foreign = 0
    for group in optimizer.param_groups:
        foreign += sum(id(parameter) not in own for parameter in group["params"])
    if foreign:
        name = type(module).__name__
        found = f"an optimizer of {foreign} parameters that are not those of {name}"
        raise UserError(key, found, "give it the module's own parameters")

    if isinstance(optimizer, LBFGS | SparseAdam):
        found = f"{type(optimizer).__name__}, which needs closures or sparse gradients"
        raise UserError(key, found, "use one of dense gradients, such as Adam")


def make_schedule(factory: ScheduleFactory, optimizer: Optimizer) -> LRScheduler:
    """Make the configuration's schedule of the learning rate over rounds.

    Raises:
        UserError: The schedule refuses its arguments, or its rate is no function of the round.
    """
    try:
        schedule = factory(optimizer)
    except (TypeError, ValueError) as error:
        raise UserError("model.lr_schedule", str(error), "correct its init_args") from error

    if isinstance(schedule, ReduceLROnPlateau):
        fix = "use a function of the round"
        raise UserError("model.lr_schedule", "ReduceLROnPlateau", fix)
    return schedule


def step_schedule(schedule: Any) -> None:
    """Advance the schedule by one round.

    Raises:
        UserError: The schedule has come to its end, or cannot count so far.
    """
    try:
        schedule.step()
    except (ValueError, ZeroDivisionError) as error:
        found = f"round {schedule.last_epoch + 1}: {error}"
        raise UserError("model.lr_schedule", found, "correct its init_args") from error
