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

# Option of `save_checkpoint`: training goes on while the checkpoint is written.
BACKGROUND = "background"


class Checkpoints:
    """Writes the checkpoints of a run, in a thread if training is to go on meanwhile.

    Every rank calls every method.

    Attributes:
        spares: Whether the next last.ckpt replaces a damaged one. Then the run goes on from the
            one before it, which must not be replaced by the damaged one.
    """

    def __init__(self) -> None:
        self.spares = False

        # Done when the thread has written its checkpoint.
        self._in_writing: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether a thread has failed, so that `finish` raises at once."""
        future = self._in_writing
        return future is not None and future.done() and future.exception() is not None

    def save(self, content: dict[str, Any], path: Path, ranks: Ranks, option: object) -> None:
        """Write a checkpoint, once the one before it is written.

        Args:
            content: The content, as dumped by Lightning.
            path: The main file.
            ranks: The ranks that write it.
            option: With `BACKGROUND`, return as soon as all of it is copied. `finish` waits for the
                rest, and raises its errors.

        Raises:
            DiskError: This checkpoint, or the one before it, cannot be written.
            TakenOver: The run continues in another process.
        """
        self.finish()

        is_last = path.name == NAME
        writing = Writing(content, path, ranks, keeps=is_last and not self.spares)
        if is_last:
            self.spares = False

        in_background = option == BACKGROUND and writing.detach(ranks)
        if not in_background:
            writing.write(ranks)
            return

        # Before the future is set: if this raises, there is no thread that could finish it.
        ranks_of_thread = ranks.for_thread()
        self._in_writing = Future[None]()

        # A daemon: the end of the process must not wait for it, because that would delay an error.
        threading.Thread(
            target=_run,
            args=(self._in_writing, writing, ranks_of_thread),
            name="lightfed-checkpoint",
            daemon=True,
        ).start()

    def finish(self) -> None:
        """Wait for the checkpoint that is written while training goes on; raise its error once.

        Raises:
            DiskError: It cannot be written; raised on every rank.
            TakenOver: The run continues in another process.
        """
        future = self._in_writing
        self._in_writing = None
        if future is not None:
            future.result()


def _run(future: Future[None], writing: Writing, ranks: Ranks) -> None:
    try:
        writing.write(ranks)
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


class LastCheckpoint(ModelCheckpoint):
    """Writes `last.ckpt` before the first round, between rounds, and after the last one.

    If a round ends while the checkpoint before it is still written, it waits. So a crash loses the
    rounds since the last checkpoint that was due, or if that was not complete, since the one
    before it.

    It is a separate type, so that its state is not mixed up with that of a user's checkpoints.

    Args:
        every: The number of rounds between two checkpoints; 1 by default.

    Attributes:
        is_configured: Whether the user has given an interval.
        rounds: The number of finished rounds in the newest checkpoint, which may still be written.
    """

    def __init__(self, every: int | None = None) -> None:
        super().__init__(
            filename=Path(NAME).stem, save_on_train_epoch_end=True, enable_version_counter=False
        )
        self.is_configured = every is not None
        self._every = 1 if every is None else every
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
        """The path of the checkpoint, known once the run has its folder."""
        assert self.dirpath is not None, "setup chooses the folder"
        return Path(self.dirpath) / NAME

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the paths of checkpoints in this folder; those elsewhere belong to other runs."""
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
        """Save the state after a round, if a checkpoint is due."""
        if trainer.global_step - self.rounds >= self._every:
            self.save(trainer, background=True)

    def save(self, trainer: L.Trainer, *, background: bool = False) -> None:
        """Save the state.

        Args:
            trainer: The trainer of the run.
            background: Whether training goes on while the checkpoint is written.
        """
        option = BACKGROUND if background else None
        trainer.save_checkpoint(self.path, storage_options=option)
        self.best_model_path = str(self.path)
        self.rounds = trainer.global_step

    def catch_up(self, trainer: L.Trainer) -> None:
        """Save the state, unless it is that of the newest checkpoint."""
        if self.rounds != trainer.global_step:
            self.save(trainer)
