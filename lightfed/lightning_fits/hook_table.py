"""Which of Lightning's hooks are called, when, and which of them a module or a callback overrides.

Every hook of lightning 2.6 has a line here, and a test fails if Lightning gets one that has none.
`docs/sessions.md` is this table in words.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks import Callback

from lightfed.utils.errors import UserError, require
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

# Of a callback that acts on steps. One of the run hears all of them from the Trainer of the run.
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

# Of a LightningDataModule that `FromTorch` reads.
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

# Hooks that packs of clients allow, as they are part of what `PackForward` and evaluations call.
_PLAIN = {"training_step", "validation_step", "test_step", "predict_step", "configure_optimizers"}


@dataclass(frozen=True)
class HookTable:
    """The hooks that act in the sessions of a group.

    Attributes:
        in_session: overridden by the group's module, besides those that every module defines.
        transfer: of batches, overridden by the module or the user's data module.
        callbacks: that act on the steps of the group's clients.
        reason: why the sessions of the group are Lightning fits; empty if they need not be.
    """

    in_session: Sequence[str] = ()
    transfer: Sequence[str] = ()
    callbacks: Sequence[Callback] = field(default_factory=tuple)
    reason: str = ""


def table_of(
    module: L.LightningModule, callbacks: Sequence[Callback], datamodule: Any = None
) -> HookTable:
    """Look up once what a group's module, its callbacks and a user's data module override.

    Hooks that are called once for each live module, or in evaluations, do not count.
    """
    name = type(module).__name__
    own = [
        hook
        for hook, when in MODULE_HOOKS.items()
        if when == "session" and hook not in _PLAIN and is_overridden(hook, module)
    ]
    transfer = [hook for hook in TRANSFER_HOOKS if hook in own or hook in vars_of(datamodule)]
    reason = ""
    if own:
        reason = f"{name} overrides {', '.join(own)}"
    elif transfer:
        reason = f"{type(datamodule).__name__} overrides {', '.join(transfer)}"
    elif callbacks:
        reason = f"{type(callbacks[0]).__name__} acts on steps"
    elif not module.automatic_optimization:
        reason = f"{name} optimises manually"
    elif _reads_batches_itself(module):
        reason = f"training_step of {name} takes no batch_idx"
    return HookTable(own, transfer, callbacks, reason)


def vars_of(datamodule: Any) -> set[str]:
    """The transfer hooks that a data module overrides."""
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
        UserError: names the hook and what to do instead.
    """
    for hook, when in MODULE_HOOKS.items():
        if when == "refused" and is_overridden(hook, module):
            found = f"{type(module).__name__} overrides {hook}, which no session calls"
            raise UserError(key, found, _INSTEAD[hook])


def check_datamodule(datamodule: Any, key: str) -> None:
    """Refuse the hooks of a user's data module that nothing would call.

    Raises:
        UserError: names the hook and what to do instead.
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
# They change the batches, steps or weights of one training loop, over the whole run.
_IDLE = (
    stock.BatchSizeFinder,
    stock.GradientAccumulationScheduler,
    stock.LearningRateFinder,
    stock.StochasticWeightAveraging,
    stock.WeightAveraging,
)
# They write files of the rank, or put other parameters in the place of a module's.
_UNFIT = {
    stock.ModelPruning: "it replaces parameters, and a client's row has a place for each; use "
    "model.algorithm: DisPFL, which prunes clients",
    stock.SpikeDetection: "it skips batches of a loader, by a file of all clients; use "
    "trainer.gradient_clip_val, or a callback with on_train_batch_end",
}
_PURE_STEP = ("on_before_zero_grad", "on_before_backward", "on_after_backward",
              "on_before_optimizer_step")  # fmt: skip


def acts_on_steps(callback: Callback) -> bool:
    """Whether a callback hears the steps of clients, and not the rounds of the run.

    It does if it overrides a hook of steps, unless it is one of Lightning's that watch a run. A
    class says it by an attribute, `hears = "rounds"` or `hears = "steps"`.

    Raises:
        UserError: it can do neither.
    """
    name, key = type(callback).__name__, "trainer.callbacks"
    idle = isinstance(callback, _IDLE)
    require(not idle, key, f"{name} has no effect on sessions", "remove it")
    for kind, fix in _UNFIT.items():
        require(not isinstance(callback, kind), key, f"{name}, which no session can have", fix)
    overridden = [hook for hook in _STEP if is_overridden(hook, callback, Callback)]
    hears = getattr(callback, "hears", None)
    require(hears in (None, "rounds", "steps"), key, f"{name}.hears is {hears!r}", "say rounds")
    watches = isinstance(callback, _OF_THE_RUN) or type(callback).__module__.startswith("lightfed.")
    if hears is None:
        hears = "steps" if overridden and not watches else "rounds"
        if isinstance(callback, stock.BaseFinetuning):
            hears = "steps"
    if hears == "rounds":
        pure = [hook for hook in overridden if hook in _PURE_STEP]
        found = f"{name} watches rounds, which have no {pure[:1]}"
        require(not pure, key, found, "give a callback of its own the hooks of steps")
        return False
    for hook, when in CALLBACK_HOOKS.items():
        if when == "refused" and is_overridden(hook, callback, Callback):
            found = f"{name} acts on steps and overrides {hook}, which no session calls"
            fix = "give a callback of its own the hooks of the run, or keep a state_dict"
            raise UserError(key, found, fix)
    return True


def split(callbacks: Iterable[Callback]) -> tuple[list[Callback], list[Callback]]:
    """The callbacks of the run, and those that act on the steps of clients."""
    run: list[Callback] = []
    steps: list[Callback] = []
    for callback in callbacks:
        (steps if acts_on_steps(callback) else run).append(callback)
    return run, steps
