"""Of two starts of a run the later one has its folder; the other ends, and touches nothing more."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.distributed.collectives import Ranks
from lightfed.distributed.slurm import Job
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.runs import run_folder as runfolder
from lightfed.runs import run_lock as fence
from lightfed.runs.checkpoint import save
from lightfed.runs.run_lock import TakenOver
from lightfed.runs.run_logger import RunLogger
from tests.promises.stopping.checkpoints import content_of, together, value_of, write
from tests.small import CPU, SGD_HALF, Line, fit, random_data

JOB = Job("12", "mini", 1)


class Process:
    """A process that has begun or resumed the run in a folder; others can run beside it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, job: Job | None = None):
        self._monkeypatch = monkeypatch
        self._tokens: dict[Path, str] = {}
        self.folder = folder
        self.do(lambda: fence.take(folder, job))

    def do(self, action: Callable[[], Any]) -> Any:
        """Do something as this process does it: with the tokens that it has written."""
        with self._monkeypatch.context() as patch:
            patch.setattr(fence, "tokens_of_process", self._tokens)
            return action()

    def writes(self) -> bool:
        """Whether it is allowed to write a checkpoint."""
        try:
            self.do(lambda: fence.check(self.folder / "checkpoints" / "last.ckpt"))
        except TakenOver:
            return False
        return True


def test_the_later_start_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process(tmp_path, monkeypatch)
    assert first.writes()

    second = Process(tmp_path, monkeypatch)
    assert not first.writes()
    assert second.writes()

    third = Process(tmp_path, monkeypatch)
    assert not first.writes()
    assert not second.writes()
    assert third.writes()


@pytest.mark.parametrize(
    ("late", "refused"),
    [
        (Job("12", "mini", 0), True),  # a start of before, that was held up until now
        (JOB, False),  # the next command of the same script
        (Job("12", "mini", 2), False),
        (Job("13", "mini", 0), False),
        (Job("12", "other", 0), False),
        (None, False),
    ],
)
def test_an_earlier_start_of_the_same_job_is_refused(
    late: Job | None, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Process(tmp_path, monkeypatch, JOB)
    if refused:
        with pytest.raises(TakenOver):
            Process(tmp_path, monkeypatch, late)
    else:
        Process(tmp_path, monkeypatch, late)
    assert owner.writes() == refused


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text('{"token"')])
def test_a_token_that_is_gone_is_nobody_s(
    spoil: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Process(tmp_path, monkeypatch)
    spoil(tmp_path / ".owner")
    assert first.writes()

    second = Process(tmp_path, monkeypatch)
    assert not first.writes()
    assert second.writes()


def test_a_relative_folder_is_that_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Process(Path(), monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    Process(tmp_path, monkeypatch)
    monkeypatch.chdir("elsewhere")
    with pytest.raises(TakenOver):
        first.do(lambda: fence.check(tmp_path / "metrics.csv"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def test_no_rank_puts_a_checkpoint_into_a_run_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    first = Process(tmp_path, monkeypatch)
    first.do(lambda: write(path, 1.0, ranks=3))
    second = Process(tmp_path, monkeypatch)
    before = contents(tmp_path)
    errors = first.do(
        lambda: together(3, lambda ranks: save(content_of(9.0, ranks.rank, 3), path, ranks))
    )
    assert [type(error) for error in errors] == [TakenOver] * 3
    assert len({str(error) for error in errors}) == 1
    assert contents(tmp_path) == before
    second.do(lambda: write(path, 2.0, ranks=3))
    assert value_of(path) == 2.0


def logger_in(folder: Path, ranks: Ranks, job: Job | None = None) -> RunLogger:
    logger = RunLogger(str(folder), "run")
    logger.place = runfolder.RunFolder(folder, "run", job=job)
    logger.place.name = "run"
    logger.place.claim(ranks)
    logger.place.own()
    return logger


WRITES: dict[str, Callable[[RunLogger], None]] = {
    "metrics": lambda logger: logger.end_round(1),
    "clients": lambda logger: logger.log_clients([{"round": 1, "client": 0}]),
}


@pytest.mark.parametrize("name", WRITES)
def test_the_first_rank_ends_when_it_may_not_write_figures(name: str, tmp_path: Path) -> None:
    """Which ends the others; what they save cannot be written either."""

    def work(ranks: Ranks) -> None:
        logger = logger_in(tmp_path, ranks)
        logger.log_metrics({"loss": 1.0}, 0)
        ranks.first(lambda: (tmp_path / "run" / ".owner").write_text(OTHER))
        if ranks.rank == 0:
            WRITES[name](logger)

    errors = together(2, work)
    assert [type(error) for error in errors] == [TakenOver, type(None)]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".owner"]


OTHER = json.dumps({"token": "theirs", "host": "n7", "pid": 4711, "job": ":12", "restarts": 1})


def test_a_folder_of_a_later_start_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".owner").write_text(OTHER)
    errors = together(2, lambda ranks: logger_in(tmp_path, ranks, Job("12", "", 0)))
    assert [type(error) for error in errors] == [TakenOver] * 2
    assert (tmp_path / "run" / ".owner").read_text() == OTHER


def test_who_has_lost_a_folder_neither_describes_nor_removes_it(tmp_path: Path) -> None:
    logger = RunLogger(str(tmp_path), "run")
    logger.place.claim(Ranks(CPU))
    logger.place.own()
    (logger.folder / ".owner").write_text(OTHER)
    with pytest.raises(TakenOver):
        logger.start({}, finished_rounds=0)
    logger.finalize("failed")
    assert [path.name for path in logger.folder.iterdir()] == [".owner"]


# A whole run.


class LosesItsFolder(L.Callback):
    """To another start, in a session of its second round; `signalled` as a leftover of SLURM is."""

    hears = "rounds"

    def __init__(self, folder: Path, *, signalled: bool) -> None:
        self.folder, self.signalled = folder, signalled
        self.before: dict[Path, bytes] = {}

    @override
    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.current_epoch == 1 and not self.before:
            trainer.strategy.checkpoints.finish()
            (self.folder / ".owner").write_text(OTHER)
            self.before = contents(self.folder)
            if self.signalled:
                signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("validated", "signalled"), [(1, False), (5, True)])
def test_a_run_ends_in_one_line_and_leaves_what_is_there(
    validated: int, signalled: bool, tmp_path: Path
) -> None:
    federation = Federation(FedAvg(), [ClientGroup(4, Line)], optimizer=SGD_HALF)
    callback = LosesItsFolder(tmp_path / "run", signalled=signalled)
    flags = {"callbacks": [callback], "check_val_every_n_epoch": validated}
    with pytest.raises(TakenOver) as ended:
        fit(federation, random_data([4] * 4, features=2), tmp_path, rounds=5, **flags)
    assert ended.value.status == 1
    assert str(ended.value) == (
        f"ckpt_path: {tmp_path / 'run'} now belongs to a later start of this run (process 4711 on "
        "n7); let that process continue; this one stops writing"
    )
    assert contents(tmp_path / "run") == callback.before
