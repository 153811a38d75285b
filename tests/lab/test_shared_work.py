"""Two commands on one folder share the work, and a killed one leaves no duplicate behind."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from typing_extensions import override

from lightfed.cli import run_locks
from lightfed.cli.wanted import Wanted
from lightfed.lab.runner import run_all
from tests.forked import forked
from tests.promises.refusals.mistakes import edited

SECONDS = 120.0
OPEN = Path("open")  # in the folder of the runs; lets a held one go on


class Held(L.Callback):
    """Holds a run in its second round until a file is there, so that it is under way meanwhile."""

    hears = "rounds"

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            until(OPEN.exists)


HELD = f"--trainer.callbacks={__name__}.Held"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    small = {"trainer.max_epochs": 3, "trainer.enable_page": False}
    (tmp_path / "run.yaml").write_text(edited(small))
    return tmp_path


def wanted(seed: int, *more: str) -> Wanted:
    return Wanted.of(["fit", "--config", "run.yaml", f"--model.seed={seed}", *more])


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


def seeds_in(folder: Path) -> list[int]:
    """The seeds of all run folders, finished or not."""
    found = [json.loads(path.read_text()) for path in folder.glob("runs/*/environment.json")]
    return sorted(stated["seed"] for stated in found)


def swept(runs: list[Wanted], folder: Path, name: str) -> None:
    """Run all, and note what came of each."""
    statuses = [outcome.status for outcome in run_all(runs)]
    (folder / name).write_text(json.dumps(statuses))


def test_two_sweeps_at_once_train_every_run_once(folder: Path) -> None:
    runs = [wanted(seed) for seed in range(3)]
    pids = [forked(lambda name=name: swept(runs, folder, name)) for name in ("first", "second")]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert seeds_in(folder) == [0, 1, 2]
    for name in ("first", "second"):
        assert json.loads((folder / name).read_text()) == [0, 0, 0]
    assert not (folder / "runs" / run_locks.FOLDER).exists()


def test_a_lock_that_a_finished_run_has_left_is_removed(folder: Path) -> None:
    """Of a training that has outlived its command."""
    run = wanted(0, "--trainer.max_epochs=1")
    assert [outcome.status for outcome in run_all([run])] == [0]
    lock = run_locks.take(run)
    assert lock is not None
    pid = forked(lambda: time.sleep(1.0))  # it is about to end, and has the lock still
    os.close(lock)
    assert [outcome.status for outcome in run_all([run])] == [0]
    os.waitpid(pid, 0)
    assert not (folder / "runs" / run_locks.FOLDER).exists()


def test_a_sweep_that_is_killed_leaves_no_duplicate_behind(folder: Path) -> None:
    """Its child trains on; the next sweep waits for it."""
    runs = [wanted(0, HELD)]
    first = folder / "runs" / "run" / "checkpoints" / "last.ckpt"
    sweep = forked(lambda: list(run_all(runs)))
    until(first.is_file)
    os.kill(sweep, signal.SIGKILL)
    os.waitpid(sweep, 0)
    assert run_locks.take(runs[0]) is None, "the training has the lock"
    pid = forked(lambda: (time.sleep(1.0), OPEN.touch()))
    (outcome,) = run_all(runs)
    os.waitpid(pid, 0)
    assert (outcome.status, outcome.seconds) == (0, 0.0), "another process trained it"
    assert seeds_in(folder) == [0]


def test_a_run_that_is_killed_with_its_sweep_is_trained_by_the_next(folder: Path) -> None:
    runs = [wanted(0, HELD)]

    def sweep() -> None:
        os.setsid()
        list(run_all(runs))

    pid = forked(sweep)
    until((folder / "runs" / "run" / "checkpoints" / "last.ckpt").is_file)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until(lambda: not _is_taken(runs[0]))
    OPEN.touch()
    (outcome,) = run_all(runs)
    assert outcome.status == 0
    assert seeds_in(folder) == [0], "it goes on in its folder"


def _is_taken(run: Wanted) -> bool:
    lock = run_locks.take(run)
    if lock is not None:
        os.close(lock)
    return lock is None


def test_a_lock_is_one_process_s_and_another_run_has_another(folder: Path) -> None:
    one, other = wanted(0), wanted(1)
    lock = run_locks.take(one)
    assert lock is not None
    assert run_locks.take(one) is None
    second = run_locks.take(other)
    assert second is not None
    run_locks.clear(one)
    assert run_locks.path_of(one).exists(), "it is taken"
    for descriptor in (lock, second):
        os.close(descriptor)
    run_locks.clear(one)
    run_locks.clear(other)
    assert not run_locks.path_of(one).parent.exists()


def test_a_run_that_diverged_elsewhere_is_not_tried_again(folder: Path) -> None:
    run = wanted(0)
    lock = run_locks.take(run)
    assert lock is not None

    def ends() -> None:
        time.sleep(1.5)
        run.diverged.parent.mkdir(parents=True, exist_ok=True)
        run.diverged.write_text("lightfed: error: model.optimizer: it diverged; lower the rate\n")

    pid = forked(ends)
    os.close(lock)  # the child has it
    (outcome,) = run_all([run])
    os.waitpid(pid, 0)
    assert (outcome.status, outcome.said) == (2, "model.optimizer: it diverged; lower the rate")
    assert not (folder / "runs" / "run").exists()
