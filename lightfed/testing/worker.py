"""Runs cases on several numbers of ranks, also resumed on another number from a suspended round.

Digests are written to a folder, one file per rank of a job: `straight-1-of-2.json`,
`resumed-0-of-4.json`.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightfed.runs.checkpoint import load
from lightfed.testing.case import ROUNDS, Case
from lightfed.testing.digest import digest, fit
from lightfed.testing.ranks import start_job, wait

Digest = dict[str, str]


@dataclass(frozen=True)
class Plan:
    """The cases to run by name, on the numbers of ranks `worlds`.

    `moves` are numbers of ranks before and after a stop; cases take turns.
    """

    cases: dict[str, Case]
    worlds: tuple[int, ...]
    moves: tuple[tuple[int, int], ...]

    def move(self, name: str) -> tuple[int, int]:
        """Numbers of ranks before and after the stop of a case."""
        return self.moves[list(self.cases).index(name) % len(self.moves)]


class Interrupt(Callback):
    """Signals one rank before its first session of a round; the others finish theirs."""

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, wave: int) -> None:
        if wave == 0:
            here = [] if batch is None else [batch]
            first = min(trainer.federation.fleet.ranks.gather(here))
            if batch == first:
                os.kill(os.getpid(), signal.SIGUSR1)


def straight(plan: Plan, name: str, folder: Path, ranks: int) -> Digest:
    """Run without stopping; also writes the checkpoint for the run that stops."""
    place = folder / f"{name}-{ranks}"
    flags: dict[str, Any] = {"enable_checkpointing": False}
    stops = ranks == plan.move(name)[0]
    if stops:
        stop = ModelCheckpoint(
            filename="stopped", every_n_epochs=ROUNDS - 1, save_on_train_epoch_end=True,
            save_last="link",
        )  # fmt: skip
        flags = {"callbacks": [stop]}
    found = digest(*fit(plan.cases[name], place, ranks=ranks, **flags))
    if stops:
        _suspend(plan.cases[name], place, ranks)
    return found


def _suspend(case: Case, place: Path, ranks: int) -> None:
    """Repeat the last round from the checkpoint before it, interrupted during its sessions."""
    path = str(place / "run" / "checkpoints" / "stopped.ckpt")
    status: Any = None
    try:
        fit(case, place, ranks=ranks, ckpt_path=path, callbacks=[Interrupt()])
    except SystemExit as left:
        status = left.code
    assert status == 128 + signal.SIGUSR1, f"a run to be suspended exited with {status}"


def resumed(plan: Plan, name: str, folder: Path, ranks: int) -> Digest:
    """Resume a run whose last round was suspended."""
    place = folder / f"{name}-{plan.move(name)[0]}"
    path = place / "run" / "checkpoints" / "last.ckpt"
    assert load(path)["global_step"] == ROUNDS - 1
    assert path.with_name("sessions.ckpt").is_file()
    flags: dict[str, Any] = {"ckpt_path": str(path), "enable_checkpointing": False}
    return digest(*fit(plan.cases[name], place, ranks=ranks, **flags))


Run = Callable[[Plan, str, Path, int], Digest]


def _job(one: Run, plan: Plan, names: list[str], folder: Path, ranks: int) -> None:
    """Run every case once, with one start of the ranks."""

    def work(rank: int) -> None:
        digests = {name: one(plan, name, folder, ranks) for name in names}
        (folder / f"{one.__name__}-{rank}-of-{ranks}.json").write_text(json.dumps(digests))

    if not wait(start_job(ranks, work)):
        sys.exit(f"{one.__name__} runs on {ranks} ranks failed")


def run(plan: Plan, folder: Path) -> None:
    """Run a plan in a process without threads, which forks the ranks."""
    for ranks in plan.worlds:
        _job(straight, plan, list(plan.cases), folder, ranks)
    for ranks in sorted({later for _, later in plan.moves}):
        names = [name for name in plan.cases if plan.move(name)[1] == ranks]
        _job(resumed, plan, names, folder, ranks)
