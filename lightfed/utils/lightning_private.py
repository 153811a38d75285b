"""The only file that imports private Lightning names.

They are those of lightning 2.6; `pyproject.toml` pins 2.6.x. A missing name fails here, at import.
"""

# ruff: noqa: F401 - imported for others

from typing import Any

import lightning.pytorch as L
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
)
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _select_data_fetcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import (
    _call_callback_hooks,
    _call_configure_model,
    _call_lightning_module_hook,
)
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


def overriding(name: str, trainer: Any) -> tuple[bool, bool]:
    """Return whether a callback overrides a hook, and whether the root module does.

    Lightning calls all hooks; at a thousand sessions per second the empty ones add up.
    """
    by_callback = any(is_overridden(name, callback, L.Callback) for callback in trainer.callbacks)
    by_module = is_overridden(name, trainer.lightning_module)
    return by_callback, by_module


def call_overridden(name: str, trainer: Any, *args: Any) -> None:
    """Call a hook of those that override it: first of callbacks, as Lightning does."""
    by_callback, by_module = overriding(name, trainer)
    if by_callback:
        _call_callback_hooks(trainer, name, *args)
    if by_module:
        _call_lightning_module_hook(trainer, name, *args)
