"""The only file that imports private Lightning names.

They are those of lightning 2.6; `pyproject.toml` pins 2.6.x. A missing name fails here, at import.
"""

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
)
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = [
    "_PATH",
    "_FitLoop",
    "_SignalConnector",
    "_TrainingEpochLoop",
    "_call_callback_hooks",
    "_call_lightning_module_hook",
    "_configure_optimizers",
    "_configure_schedulers_automatic_opt",
    "is_overridden",
]
