"""Runs cases on several numbers of ranks, and resumes them on another number after a stop.

Digests are written to a folder, in one file for each rank of a job, such as `straight-1-of-2.json`
and `resumed-0-of-4.json`.
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
    """What to run.

    Attributes:
        cases: The cases by name.
        worlds: The numbers of ranks on which every case runs.
        moves: The numbers of ranks before and after a stop. The cases take them by turns.
    """

    cases: dict[str, Case]
    worlds: tuple[int, ...]
    moves: tuple[tuple[int, int], ...]

    def move(self, name: str) -> tuple[int, int]:
        """Return the numbers of ranks before and after the stop of a case."""
        return self.moves[list(self.cases).index(name) % len(self.moves)]


class Interrupt(Callback):
    """Signals one rank before its first session of a round; the others finish theirs."""

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, wave: int) -> None:
        if wave > 0:
            return

        # A batch is a client. The rank with the lowest one of this wave is signaled.
        clients = [] if batch is None else [batch]
        first = min(trainer.federation.fleet.ranks.gather(clients))
        if batch == first:
            os.kill(os.getpid(), signal.SIGUSR1)


def straight(plan: Plan, name: str, folder: Path, ranks: int) -> Digest:
    """Run a case without stopping, and return its digest.

    On the number of ranks on which the case is to be stopped, it is then stopped as well.
    """
    case = plan.cases[name]
    run_folder = folder / f"{name}-{ranks}"
    ranks_before_stop, _ = plan.move(name)
    if ranks != ranks_before_stop:
        return digest(*fit(case, run_folder, ranks=ranks, enable_checkpointing=False))

    before_last_round = ModelCheckpoint(
        filename="stopped",
        every_n_epochs=ROUNDS - 1,
        save_on_train_epoch_end=True,
        save_last="link",
    )
    case_digest = digest(*fit(case, run_folder, ranks=ranks, callbacks=[before_last_round]))
    _suspend(case, run_folder, ranks)
    return case_digest


def _suspend(case: Case, folder: Path, ranks: int) -> None:
    """Repeat the last round from the checkpoint before it, interrupted during its sessions."""
    path = str(folder / "run" / "checkpoints" / "stopped.ckpt")
    status: Any = None
    try:
        fit(case, folder, ranks=ranks, ckpt_path=path, callbacks=[Interrupt()])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 128 + signal.SIGUSR1, f"a run to be suspended exited with {status}"


def resumed(plan: Plan, name: str, folder: Path, ranks: int) -> Digest:
    """Resume a case whose last round was suspended, and return its digest."""
    ranks_before_stop, _ = plan.move(name)
    run_folder = folder / f"{name}-{ranks_before_stop}"
    path = run_folder / "run" / "checkpoints" / "last.ckpt"
    assert load(path)["global_step"] == ROUNDS - 1
    assert path.with_name("sessions.ckpt").is_file()

    trainer, federation = fit(
        plan.cases[name],
        run_folder,
        ranks=ranks,
        ckpt_path=str(path),
        enable_checkpointing=False,
    )
    return digest(trainer, federation)


Run = Callable[[Plan, str, Path, int], Digest]


def _job(run_case: Run, plan: Plan, names: list[str], folder: Path, ranks: int) -> None:
    """Run some cases, one after the other, with one start of the ranks."""
    kind = run_case.__name__

    def work(rank: int) -> None:
        digests = {name: run_case(plan, name, folder, ranks) for name in names}
        (folder / f"{kind}-{rank}-of-{ranks}.json").write_text(json.dumps(digests))

    if not wait(start_job(ranks, work)):
        sys.exit(f"{kind} runs on {ranks} ranks failed")


def run(plan: Plan, folder: Path) -> None:
    """Run a plan in a process without threads, which forks the ranks."""
    for ranks in plan.worlds:
        _job(straight, plan, list(plan.cases), folder, ranks)
    for ranks in sorted({after_stop for _, after_stop in plan.moves}):
        names = [name for name in plan.cases if plan.move(name)[1] == ranks]
        _job(resumed, plan, names, folder, ranks)
