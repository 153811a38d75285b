"""Learning rates of sessions whose modules configure their own optimizers and schedulers."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer


class SessionRates:
    """Reads the optimizers of a group's sessions as the run's LearningRateMonitor would.

    The Trainer of the run has no optimizer that such a module configures, so the monitor itself
    finds nothing there. The session logs the rates instead, before each of its batches.

    Args:
        monitor: Of the run; it says whether momentum and weight decay are logged too.
        group: The name of the group, where others have rates of the same name; empty elsewhere.
    """

    def __init__(self, monitor: LearningRateMonitor, group: str = "") -> None:
        self._suffix = f"/{group}" if group else ""
        # One of its own, because a monitor keeps what it has read.
        self._monitor = LearningRateMonitor(
            log_momentum=monitor.log_momentum, log_weight_decay=monitor.log_weight_decay
        )

    def of(
        self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRSchedulerConfig]
    ) -> dict[str, float]:
        """The present rates by the names that Lightning gives them, such as `lr-SGD/pg1`."""
        trainer: Any = SimpleNamespace(
            optimizers=optimizers,
            lr_scheduler_configs=schedulers,
            callback_metrics={},
            strategy=SimpleNamespace(root_device="cpu"),
        )
        rates = self._monitor._extract_stats(trainer, "any")
        self._monitor.lrs.clear()
        return {f"{name}{self._suffix}": value for name, value in rates.items()}
