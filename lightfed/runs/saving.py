"""When checkpoints are written: beside the next round, in a thread."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightfed.distributed.collectives import Ranks
from lightfed.runs.checkpoint import LAST as NAME
from lightfed.runs.checkpoint import Writing

BACKGROUND = "background"  # storage option: training goes on while the checkpoint is written


class Checkpoints:
    """Saves; every method is called by every rank. A thread may write while training goes on.

    Attributes:
        spares: The next last.ckpt replaces a damaged one, and the run goes on from the one before
            it: that one stays, and the damaged one does not take its place.
    """

    def __init__(self) -> None:
        self._job: Future[None] | None = None
        self.spares = False

    @property
    def failed(self) -> bool:
        """Whether `finish` raises already."""
        return self._job is not None and self._job.done() and self._job.exception() is not None

    def save(self, content: dict[str, Any], path: Path, ranks: Ranks, option: object) -> None:
        """Write a checkpoint, after the one before it.

        `content` is as dumped by Lightning. With the option BACKGROUND it returns when all of it is
        copied; `finish` waits for the rest, and has the same errors. The process does not wait for
        it at its exit, where it would be in the way of an error.
        """
        self.finish()
        keeps = path.name == NAME and not self.spares
        writing = Writing(content, path, ranks, keeps=keeps)
        if path.name == NAME:
            self.spares = False
        if option != BACKGROUND or not writing.detach(ranks):
            writing.write(ranks)
            return
        there, self._job = ranks.for_thread(), Future[None]()
        job = (self._job, writing, there)
        threading.Thread(target=_run, args=job, name="lightfed-checkpoint", daemon=True).start()

    def finish(self) -> None:
        """Wait for the checkpoint that is written while training goes on; raises once.

        A DiskError on every rank if it cannot be written, and TakenOver if the run continues in
        another process.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()


def _run(future: Future[None], writing: Writing, ranks: Ranks) -> None:
    try:
        writing.write(ranks)
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


class LastCheckpoint(ModelCheckpoint):
    """Writes `last.ckpt` before the first round, between rounds, and after the last one.

    A round that ends while the one before is written waits for it. So a crash loses the rounds
    since the last checkpoint that was due, and if it was not complete, since the one before it.

    It is a separate type so that its state is not mixed up with that of a user's checkpoints.

    Args:
        every: rounds between two checkpoints; 1 by default.

    Attributes:
        is_configured: whether an interval is given.
        rounds: finished in the newest checkpoint, which may be in writing.
    """

    def __init__(self, every: int | None = None) -> None:
        super().__init__(
            filename=Path(NAME).stem, save_on_train_epoch_end=True, enable_version_counter=False
        )
        self.is_configured = every is not None
        self._every = every or 1
        self.rounds = 0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write to the run folder, where resuming looks for it, regardless of loggers."""
        logger = getattr(trainer, "run_logger", None)
        if logger is not None and logger.claimed:
            self.dirpath = str(logger.folder / "checkpoints")
        super().setup(trainer, pl_module, stage)

    @property
    def path(self) -> Path:
        """Path of the checkpoint, available once the run has its folder."""
        assert self.dirpath is not None, "setup chooses the folder"
        return Path(self.dirpath) / NAME

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the paths of checkpoints in this folder; those elsewhere are another run's."""
        if state_dict.get("dirpath") == self.dirpath:
            super().load_state_dict(state_dict)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the state before the first round, so that the round can be suspended."""
        super().on_train_start(trainer, pl_module)
        resumed = trainer.ckpt_path
        if resumed is None or Path(resumed).resolve() != self.path.resolve():
            self.save(trainer)
        self.rounds = trainer.global_step

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the state after a round, if it is time."""
        if trainer.global_step - self.rounds >= self._every:
            self.save(trainer, background=True)

    def save(self, trainer: L.Trainer, *, background: bool = False) -> None:
        """Save the state; with `background`, while training goes on."""
        trainer.save_checkpoint(self.path, storage_options=BACKGROUND if background else None)
        self.best_model_path = str(self.path)
        self.rounds = trainer.global_step

    def catch_up(self, trainer: L.Trainer) -> None:
        """Save the state, unless it is that of the newest checkpoint."""
        if self.rounds != trainer.global_step:
            self.save(trainer)
