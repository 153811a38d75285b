"""The checkpoint that every run keeps, from which a requeued job or a killed run resumes."""

import time
from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightfed.runs.run_logger import RunLogger

NAME = "last.ckpt"
BACKGROUND = "background"  # storage option: training goes on while the checkpoint is written


class LastCheckpoint(ModelCheckpoint):
    """Writes `last.ckpt` before the first round, between rounds, and after the last one.

    A round that ends while the one before is written waits for it. So a crash loses the rounds
    since the last checkpoint that was due, and if it was not complete, since the one before it.

    It is a separate type so that its state is not mixed up with that of a user's checkpoints.

    Args:
        every: rounds between two checkpoints.
        minutes: between two checkpoints; the first of both counts. With neither, every round.

    Attributes:
        is_configured: whether an interval is given.
        rounds: finished in the newest checkpoint, which may be in writing.
    """

    def __init__(self, every: int | None = None, minutes: float | None = None) -> None:
        super().__init__(
            filename=Path(NAME).stem, save_on_train_epoch_end=True, enable_version_counter=False
        )
        self.is_configured = every is not None or minutes is not None
        self._every = every if self.is_configured else 1
        self._minutes = minutes
        self._saved_at = 0.0
        self.rounds = 0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write to the run folder, where resuming looks for it, regardless of loggers."""
        logger = next((x for x in trainer.loggers if isinstance(x, RunLogger)), None)
        if logger is not None and logger.claimed:
            self.dirpath = str(logger.folder / "checkpoints")
        super().setup(trainer, pl_module, stage)

    @property
    def path(self) -> Path:
        """Path of the checkpoint, available once the run has its folder."""
        assert self.dirpath is not None, "setup chooses the folder"
        return Path(self.dirpath) / NAME

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the state before the first round, so that the round can be suspended."""
        super().on_train_start(trainer, pl_module)
        resumed = trainer.ckpt_path
        if resumed is None or Path(resumed).resolve() != self.path.resolve():
            self.save(trainer)
        self.rounds, self._saved_at = trainer.global_step, time.monotonic()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the state after a round, if it is time."""
        due = self._every is not None and trainer.global_step - self.rounds >= self._every
        if self._minutes is not None and not due:
            passed = time.monotonic() - self._saved_at > 60 * self._minutes
            due = trainer.strategy.broadcast(passed)
        if due:
            self.save(trainer, background=True)

    def save(self, trainer: L.Trainer, *, background: bool = False) -> None:
        """Save the state; with `background`, while training goes on."""
        trainer.save_checkpoint(self.path, storage_options=BACKGROUND if background else None)
        self.best_model_path = str(self.path)
        self.rounds, self._saved_at = trainer.global_step, time.monotonic()

    def catch_up(self, trainer: L.Trainer) -> None:
        """Save the state, unless it is that of the newest checkpoint."""
        if self.rounds != trainer.global_step:
            self.save(trainer)
