"""A callback that holds a run during a round until something has happened to its job."""

import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.utils import signals

FOLDER = Path("gate")
ROUND, WAVE = 2, 1  # counted from 0: two rounds and a wave are over
SECONDS = 300
POLL = 0.05


def job_name() -> str:
    """The number of this job, or of this array task, as `scontrol` takes it."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


class Gate(Callback):
    """Holds the first start of a job until a file is there or a signal was taken down.

    Every rank writes its process id to gate/<job>-<rank>, then waits for gate/<job>-open. Rank 0
    notes in gate/<job>-rounds with which start of the job it begins which round.
    """

    hears = "rounds"

    @property
    def _start(self) -> int:
        return int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            FOLDER.mkdir(exist_ok=True)
            with (FOLDER / f"{job_name()}-rounds").open("a") as file:
                file.write(f"{self._start} {trainer.current_epoch}\n")

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, wave: int) -> None:
        if self._start > 0 or (trainer.current_epoch, wave) != (ROUND, WAVE):
            return
        (FOLDER / f"{job_name()}-{trainer.global_rank}").write_text(f"{os.getpid()}")
        limit = time.monotonic() + SECONDS
        while not (FOLDER / f"{job_name()}-open").exists() and signals.asked() is None:
            assert time.monotonic() < limit, "nobody opened the gate"
            time.sleep(POLL)
