"""Says which of Lightning's hooks are called when, and finds out which of them are overridden.

Every hook of lightning 2.6 has a line here. A test fails if Lightning gets one that has none.
`docs/sessions.md` is this table in words.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks import Callback

from lightfed.utils.errors import UserError
from lightfed.utils.lightning_private import is_overridden, is_param_in_hook_signature

# When a hook is called:
#   session     in every session, at the place where Lightning calls it in a fit
#   module      once for each live module, before its rows are laid out, or after the run
#   run         by the Trainer of the run, which counts rounds as epochs
#   evaluation  when a client's model is validated, tested or asked for predictions
#   data        when the samples of a data module are read
#   never       nowhere, as Lightning does with `num_sanity_val_steps=0`
#   refused     the run ends with a line that names it
When = Literal["session", "module", "run", "evaluation", "data", "never", "refused"]

_STEP: dict[str, When] = dict.fromkeys(
    (
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
    ),
    "session",
)
_FIT: dict[str, When] = dict.fromkeys(
    (
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
    ),
    "session",
)
_EVALUATION: dict[str, When] = {
    f"on_{kind}_{moment}": "evaluation"
    for kind in ("validation", "test", "predict")
    for moment in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
}
_TRANSFER: dict[str, When] = dict.fromkeys(
    ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"), "session"
)

MODULE_HOOKS: Mapping[str, When] = {
    "configure_callbacks": "module",
    "prepare_data": "module",
    "setup": "module",
    "configure_model": "module",
    "teardown": "module",
    **_TRANSFER,
    **_FIT,
    **_STEP,
    "configure_optimizers": "session",
    "training_step": "session",
    "backward": "session",
    "configure_gradient_clipping": "session",
    "optimizer_step": "session",
    "optimizer_zero_grad": "session",
    "lr_scheduler_step": "session",
    "validation_step": "evaluation",
    "test_step": "evaluation",
    "predict_step": "evaluation",
    **_EVALUATION,
    "on_validation_model_eval": "evaluation",
    "on_validation_model_train": "evaluation",
    "on_test_model_eval": "evaluation",
    "on_test_model_train": "evaluation",
    "on_predict_model_eval": "evaluation",
    # Lightning calls it between the steps of a fit that validates; sessions do not validate.
    "on_validation_model_zero_grad": "refused",
    "configure_sharded_model": "refused",
    "train_dataloader": "refused",
    "val_dataloader": "refused",
    "test_dataloader": "refused",
    "predict_dataloader": "refused",
    "on_save_checkpoint": "refused",
    "on_load_checkpoint": "refused",
}

# The hooks of a callback that acts on steps. Those of a callback of the run are all called by the
# Trainer of the run.
CALLBACK_HOOKS: Mapping[str, When] = {
    "setup": "module",
    "teardown": "module",
    **_FIT,
    **_STEP,
    "on_exception": "session",
    "state_dict": "session",
    "load_state_dict": "session",
    **dict.fromkeys(_EVALUATION, "refused"),
    "on_sanity_check_start": "never",
    "on_sanity_check_end": "never",
    "on_save_checkpoint": "refused",
    "on_load_checkpoint": "refused",
}

# The hooks of a LightningDataModule that `FromTorch` reads.
DATA_HOOKS: Mapping[str, When] = {
    "prepare_data": "data",
    "setup": "data",
    "train_dataloader": "data",
    "test_dataloader": "data",
    "val_dataloader": "never",
    "predict_dataloader": "never",
    "teardown": "run",
    **_TRANSFER,
    "on_exception": "run",
    "state_dict": "refused",
    "load_state_dict": "refused",
}

TRANSFER_HOOKS = tuple(_TRANSFER)

# What a user can do instead of overriding a hook that is refused.
_INSTEAD = {
    "on_validation_model_zero_grad": "clear gradients in on_validation_start",
    "configure_sharded_model": "build the layers in configure_model",
    "train_dataloader": "give its samples as data.dataset, such as FromTorch(train, test)",
    "val_dataloader": "give its samples as data.dataset, such as FromTorch(train, test)",
    "test_dataloader": "give its samples as data.dataset, such as FromTorch(train, test)",
    "predict_dataloader": "give the batches to trainer.predict",
    "on_save_checkpoint": "keep a client's state in buffers, or set model.keep_optimizer",
    "on_load_checkpoint": "keep a client's state in buffers, or set model.keep_optimizer",
    "state_dict": "compute what it holds in setup: a data module is read once",
    "load_state_dict": "compute what it holds in setup: a data module is read once",
}

# Hooks that every module overrides, or that a session without Lightning's loops calls as well. They
# are no reason for Lightning's loops.
_PLAIN = {"training_step", "validation_step", "test_step", "predict_step", "configure_optimizers"}


@dataclass(frozen=True)
class HookTable:
    """The hooks that act in the sessions of a group.

    Attributes:
        in_session: Hooks that the group's module overrides, besides those that every module has.
        transfer: Hooks of batches on their way to the device that the module or the user's data
            module overrides.
        callbacks: Callbacks that act on the steps of the group's clients.
        reason: Why the sessions of the group are Lightning fits; empty if they need not be.
    """

    in_session: Sequence[str] = ()
    transfer: Sequence[str] = ()
    callbacks: Sequence[Callback] = field(default_factory=tuple)
    reason: str = ""


def table_of(
    module: L.LightningModule, callbacks: Sequence[Callback], datamodule: Any = None
) -> HookTable:
    """Find out what a group's module, its callbacks and a user's data module override.

    This is done once for each group. Hooks that are called once for each live module, or in
    evaluations, do not count.
    """
    in_session = []
    for hook, when in MODULE_HOOKS.items():
        if when == "session" and hook not in _PLAIN and is_overridden(hook, module):
            in_session.append(hook)
    of_datamodule = transfer_hooks_of(datamodule)
    transfer = [hook for hook in TRANSFER_HOOKS if hook in in_session or hook in of_datamodule]

    module_name = type(module).__name__
    if in_session:
        reason = f"{module_name} overrides {', '.join(in_session)}"
    elif transfer:
        reason = f"{type(datamodule).__name__} overrides {', '.join(transfer)}"
    elif callbacks:
        reason = f"{type(callbacks[0]).__name__} acts on steps"
    elif not module.automatic_optimization:
        reason = f"{module_name} optimizes manually"
    elif _reads_batches_itself(module):
        reason = f"training_step of {module_name} takes no batch_idx"
    else:
        reason = ""
    return HookTable(in_session, transfer, callbacks, reason)


def transfer_hooks_of(datamodule: Any) -> set[str]:
    """Return the transfer hooks that a data module overrides; none if there is no data module."""
    if datamodule is None:
        return set()
    return {hook for hook in TRANSFER_HOOKS if is_overridden(hook, datamodule)}


def _reads_batches_itself(module: L.LightningModule) -> bool:
    """Whether `training_step` has other arguments than a batch and its number."""
    step = module.training_step
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        return True
    return not is_param_in_hook_signature(step, "batch_idx", min_args=2)


def check_module(module: L.LightningModule, key: str) -> None:
    """Refuse the hooks of a client's module that nothing would call.

    Raises:
        UserError: The module overrides such a hook. It names the hook and what to do instead.
    """
    for hook, when in MODULE_HOOKS.items():
        if when == "refused" and is_overridden(hook, module):
            found = f"{type(module).__name__} overrides {hook}, which no session calls"
            raise UserError(key, found, _INSTEAD[hook])


def check_datamodule(datamodule: Any, key: str) -> None:
    """Refuse the hooks of a user's data module that nothing would call.

    Raises:
        UserError: The data module overrides such a hook. It names the hook and what to do instead.
    """
    for hook, when in DATA_HOOKS.items():
        if when == "refused" and is_overridden(hook, datamodule, L.LightningDataModule):
            found = f"{type(datamodule).__name__} overrides {hook}, which nothing calls"
            raise UserError(key, found, _INSTEAD[hook])


# Callbacks of Lightning that hear rounds as epochs, and waves of sessions as batches.
_OF_THE_RUN = (
    stock.Checkpoint,
    stock.EarlyStopping,
    stock.ProgressBar,
    stock.ModelSummary,
    stock.LearningRateMonitor,
    stock.DeviceStatsMonitor,
    stock.Timer,
    stock.ThroughputMonitor,
    stock.BasePredictionWriter,
    stock.OnExceptionCheckpoint,
)
# Callbacks that change the batches, steps or weights of a single training loop, over a whole run.
_WITHOUT_EFFECT = (
    stock.BatchSizeFinder,
    stock.GradientAccumulationScheduler,
    stock.LearningRateFinder,
    stock.StochasticWeightAveraging,
    stock.WeightAveraging,
)
# Callbacks that no session can have, and what to do instead.
_UNFIT = {
    stock.ModelPruning: "it replaces parameters, and a client's row has a place for each; use "
    "model.algorithm: DisPFL, which prunes clients",
    stock.SpikeDetection: "it skips batches of a loader, by a file of all clients; use "
    "trainer.gradient_clip_val, or a callback with on_train_batch_end",
}
# Hooks of steps that have no counterpart in a round. The others have one: the start and the end of
# a wave of sessions.
_OF_STEPS_ONLY = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


def acts_on_steps(callback: Callback) -> bool:
    """Whether a callback hears the steps of clients, and not the rounds of the run.

    It does if it overrides a hook of steps, unless it is one of Lightning's that watch a run. A
    class can say it by an attribute, `hears = "rounds"` or `hears = "steps"`.

    Raises:
        UserError: The callback can hear neither.
    """
    name = type(callback).__name__
    if isinstance(callback, _WITHOUT_EFFECT):
        found = f"{name} has no effect on sessions"
        raise UserError("trainer.callbacks", found, "remove it")
    for unfit, fix in _UNFIT.items():
        if isinstance(callback, unfit):
            raise UserError("trainer.callbacks", f"{name}, which does not work in sessions", fix)

    overridden = [hook for hook in _STEP if is_overridden(hook, callback, Callback)]
    if _hears(callback, overridden) == "rounds":
        for hook in overridden:
            if hook in _OF_STEPS_ONLY:
                found = f"{name} watches rounds, which have no {hook}"
                fix = "give a callback of its own the hooks of steps"
                raise UserError("trainer.callbacks", found, fix)
        return False

    for hook, when in CALLBACK_HOOKS.items():
        if when == "refused" and is_overridden(hook, callback, Callback):
            found = f"{name} acts on steps and overrides {hook}, which no session calls"
            fix = "give a callback of its own the hooks of the run, or keep a state_dict"
            raise UserError("trainer.callbacks", found, fix)
    return True


def _hears(callback: Callback, overridden: Sequence[str]) -> Literal["rounds", "steps"]:
    """Return what a callback hears: what its class says, or else what its hooks suggest.

    Args:
        callback: The callback.
        overridden: The hooks of steps that it overrides.

    Raises:
        UserError: Its class says something else.
    """
    hears = getattr(callback, "hears", None)
    if hears is not None:
        if hears not in ("rounds", "steps"):
            found = f"{type(callback).__name__}.hears is {hears!r}"
            raise UserError("trainer.callbacks", found, "say rounds or steps")
        said: Literal["rounds", "steps"] = hears
        return said

    if isinstance(callback, stock.BaseFinetuning):
        return "steps"  # it freezes parameters at the start of a fit, and thaws them in epochs
    is_ours = type(callback).__module__.startswith("lightfed.")
    if isinstance(callback, _OF_THE_RUN) or is_ours or not overridden:
        return "rounds"
    return "steps"


def split(callbacks: Iterable[Callback]) -> tuple[list[Callback], list[Callback]]:
    """Return the callbacks of the run, and those that act on the steps of clients.

    Raises:
        UserError: A callback can be neither.
    """
    of_the_run: list[Callback] = []
    on_steps: list[Callback] = []
    for callback in callbacks:
        if acts_on_steps(callback):
            on_steps.append(callback)
        else:
            of_the_run.append(callback)
    return of_the_run, on_steps
