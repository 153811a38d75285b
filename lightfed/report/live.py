"""The page of a run that goes on, built between rounds."""

import logging
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightfed.utils.errors import UserError

EVERY = 20.0  # seconds between two pages at least
SHARE = 0.02  # of the time of a run that its pages may take


class LivePage(Callback):
    """Builds index.html between two rounds; it loads itself again until the run ends."""

    def __init__(self) -> None:
        self._due = time.monotonic() + EVERY
        self._built = False

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        begin = time.monotonic()
        if trainer.current_epoch == 0 or begin < self._due:
            return
        self._build(trainer, live=True)
        now = time.monotonic()
        self._due = now + max(EVERY, (now - begin) / SHARE)

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The page of a run that was stopped stays as it is."""
        if self._built:
            self._build(trainer, live=False)

    def _build(self, trainer: Any, *, live: bool) -> None:
        logger = trainer.run_logger
        if logger is None or not trainer.is_global_zero:
            return
        from lightfed.report.page import build

        try:
            build(logger.folder, live=live)
            self._built = True
        except UserError as error:  # no reason to end a run
            logging.getLogger(__name__).warning("the page is not built: %s", error)
