"""The checkpoint that every run keeps, from which a requeued job or a killed run resumes."""

from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightfed.runs.run_logger import RunLogger

NAME = "last.ckpt"


class LastCheckpoint(ModelCheckpoint):
    """Writes `last.ckpt` before the first round and after every one.

    It is a separate type so that its state is not mixed up with that of a user's checkpoints.
    """

    def __init__(self) -> None:
        # Write that file after every round; save_last would write it only in addition to another.
        super().__init__(
            filename=Path(NAME).stem,
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

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
            trainer.save_checkpoint(self.path)
