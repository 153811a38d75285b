"""Learning rates of sessions whose modules configure their own optimizers and schedulers."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer


class SessionRates:
    """Reads the optimizers of a group's sessions as the run's LearningRateMonitor would.

    The Trainer of the run does not have the optimizers that a client's module configures, so the
    monitor itself finds nothing there. The session logs the rates instead, before each batch.

    Args:
        monitor: The monitor of the run, which says whether momentum and weight decay are logged.
        group: The name of the group, if other groups have rates of the same names; else empty.
    """

    def __init__(self, monitor: LearningRateMonitor, group: str = "") -> None:
        self._suffix = f"/{group}" if group else ""
        # Not the run's own monitor, because a monitor keeps what it has read.
        self._monitor = LearningRateMonitor(
            log_momentum=monitor.log_momentum, log_weight_decay=monitor.log_weight_decay
        )

    def of(
        self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRSchedulerConfig]
    ) -> dict[str, float]:
        """Return the present rates by the names that Lightning gives, such as `lr-SGD/pg1`."""
        # The monitor asks a Trainer for no more than this.
        trainer: Any = SimpleNamespace(
            optimizers=optimizers,
            lr_scheduler_configs=schedulers,
            callback_metrics={},
            strategy=SimpleNamespace(root_device="cpu"),
        )
        rates = self._monitor._extract_stats(trainer, "any")
        self._monitor.lrs.clear()
        return {f"{name}{self._suffix}": value for name, value in rates.items()}
