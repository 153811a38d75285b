"""The page of a run that goes on, built between rounds."""

import logging
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightfed.utils.errors import UserError

EVERY = 10.0  # seconds between two pages, if rounds are shorter
SHARE = 0.02  # of the time of a run that its pages may take, if rounds are shorter


class LivePage(Callback):
    """Builds index.html between two rounds; it loads itself again until the run ends.

    It is never older than a round, EVERY seconds, or 1 / SHARE times the seconds that it took to
    build, whichever is longest.
    """

    def __init__(self) -> None:
        self._begun = self._written = time.monotonic()
        self._cost, self._built = 0.0, False

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = time.monotonic()
        lasted, self._begun = now - self._begun, now
        oldest = max(lasted, EVERY, self._cost / SHARE)
        # the next chance comes after another round
        if trainer.current_epoch > 0 and now + lasted - self._written > oldest:
            self._build(trainer, live=True)
            self._written = now
            self._cost = time.monotonic() - now

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
