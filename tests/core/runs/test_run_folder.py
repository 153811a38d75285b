"""Which folder a run gets: numbered anywhere, the job's own under SLURM, never a stranger's."""

import errno
import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.cli.command_line import main
from lightfed.distributed import requeue
from lightfed.distributed.collectives import Ranks
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.runs import run_folder as runfolder
from lightfed.runs import run_lock
from lightfed.runs.run_logger import RunLogger
from lightfed.utils.errors import DiskError, UserError
from lightfed.utils.record import read_record
from tests.promises.refusals.mistakes import edited
from tests.small import CPU, SGD_HALF, Line, fit, random_data, server_row


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test is in a real job."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    process(monkeypatch)


def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on as in another process."""
    monkeypatch.setattr(runfolder, "folders_of_process", set())


def job(monkeypatch: pytest.MonkeyPatch, number: int, *, restarts: int = 0, task: int = 0) -> None:
    """Start, or restart, a job."""
    process(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", str(number))
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    if task:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", str(number - task))
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))


def start(folder: Path, *, config: str | None = "c", name: str = "run") -> RunLogger:
    """What `fit` does of a command line without a checkpoint."""
    logger = RunLogger(str(folder), name)
    logger.place.config = config
    logger.place.resume_job()
    logger.place.claim(Ranks(CPU))
    return logger


def saved(logger: RunLogger, name: str = "last.ckpt") -> Path:
    path = logger.folder / "checkpoints" / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    ("begun", "then", "cluster", "name", "resumed"),
    [
        ([(12, 0)], (12, 0), "", "run-12", True),
        ([(12, 0)], (13, 0), "", "run-13", False),
        ([(12, 0)], (12, 0), "other", "run-12-2", False),  # which counts from 1 again
        ([(21, 1), (31, 11)], (21, 1), "", "run-20_1", True),  # a task, not its sibling
    ],
)
def test_the_same_job_goes_on_and_another_one_begins(
    begun: list[tuple[int, int]],
    then: tuple[int, int],
    cluster: str,
    name: str,
    resumed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, task in begun:
        job(monkeypatch, number, task=task)
        saved(start(tmp_path))
    job(monkeypatch, then[0], restarts=1, task=then[1])
    if cluster:
        monkeypatch.setenv("SLURM_CLUSTER_NAME", cluster)
    again = start(tmp_path)
    assert (again.folder.name, again.place.resumed) == (name, resumed)


def test_a_job_that_died_before_its_first_checkpoint_uses_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restarts in (0, 1):
        job(monkeypatch, 12, restarts=restarts)
        again = start(tmp_path)
    assert (again.folder.name, again.place.resumed) == ("run-12", False)


@pytest.mark.parametrize("configs", [("a", "b"), (None, None)])
def test_runs_of_a_job_are_told_apart_by_configuration_or_those_of_a_script_by_order(
    configs: tuple[str | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restarts in (0, 1):  # requeued, both find their own
        job(monkeypatch, 12, restarts=restarts)
        for config, name in zip(configs, ("run-12", "run-12-2"), strict=True):
            logger = start(tmp_path, config=config)
            assert (logger.folder.name, logger.place.resumed) == (name, restarts == 1)
            saved(logger)


def step(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    *,
    restarts: int = 0,
    last: bool = False,
) -> RunLogger:
    """Start the run as a step of job 12, with or without `--ckpt_path last`."""
    job(monkeypatch, 12, restarts=restarts)
    monkeypatch.setenv("SLURM_STEP_ID", str(number))
    logger = RunLogger(str(folder), "run")
    logger.place.config = "c"
    if logger.place.resume_job() is None and last:
        logger.place.resume_newest(trains=True)
    logger.place.claim(Ranks(CPU))
    logger.place.own()
    logger.start({}, finished_rounds=0)
    saved(logger)
    return logger


def belongs_to(folder: Path, **owner: Any) -> None:
    """Let a folder be written by another process than this one."""
    path = folder / run_lock.OWNER
    path.write_text(json.dumps(json.loads(path.read_text()) | owner))


@pytest.mark.parametrize("last", [False, True])
def test_two_steps_of_a_job_have_a_folder_each(
    last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same time; each finds its own again when the job is requeued, in any order."""
    step(tmp_path, monkeypatch, 0)
    belongs_to(tmp_path / "run-12", pid=os.getppid())
    second = step(tmp_path, monkeypatch, 1, last=last)
    assert (second.folder.name, second.place.resumed) == ("run-12-2", False)
    for number, name in ((1, "run-12-2"), (0, "run-12")):
        again = step(tmp_path, monkeypatch, number, restarts=1)
        assert (again.folder.name, again.place.resumed) == (name, True)


def test_a_step_does_not_take_the_folder_that_another_has_just_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(monkeypatch, 12)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    start(tmp_path)  # it has no checkpoint yet
    belongs_to(tmp_path / "run-12", pid=os.getppid())
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert start(tmp_path).folder.name == "run-12-2"


def test_a_step_goes_on_with_the_run_of_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shell of salloc, where a step that was stopped is started again."""
    step(tmp_path, monkeypatch, 0)
    gone = subprocess.Popen(["true"])
    gone.wait()
    belongs_to(tmp_path / "run-12", pid=gone.pid)
    second = step(tmp_path, monkeypatch, 1)
    assert (second.folder.name, second.place.resumed) == ("run-12", True)


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("StepId=12.0 UserId=0 State=RUNNING Name=x", "run-12-2"),
        ("StepId=12.0 State=COMPLETED", "run-12"),
        ("", "run-12"),
    ],
)
def test_a_step_of_another_node_is_asked_for(
    answer: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(tmp_path, monkeypatch, 0)
    belongs_to(tmp_path / "run-12", host="another")
    asked: list[str] = []

    def scontrol(run: Any, *words: str) -> "subprocess.CompletedProcess[str]":
        asked.append(" ".join(words))
        return subprocess.CompletedProcess(words, 0 if answer else 1, answer, "")

    monkeypatch.setattr(requeue, "scontrol", scontrol)
    assert step(tmp_path, monkeypatch, 1).folder.name == name
    assert set(asked) == {"show step -o 12.0"}


def test_where_a_job_started_from_counts_until_it_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(monkeypatch, 12)
    saved(start(tmp_path))
    place = RunLogger(str(tmp_path), "run").place
    place.config = "c"
    assert place.resume_job(requeued=True) is None  # what the command line names is meant
    job(monkeypatch, 12, restarts=1)
    place = RunLogger(str(tmp_path), "run").place
    place.config = "c"
    assert place.resume_job(requeued=True) == tmp_path / "run-12" / "checkpoints" / "last.ckpt"


def test_a_run_from_elsewhere_does_not_overwrite_the_jobs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(monkeypatch, 12)
    saved(start(tmp_path))
    logger = RunLogger(str(tmp_path), "run")
    logger.place.config = "c"
    logger.place.resume_from(tmp_path.parent / "run" / "checkpoints" / "last.ckpt")
    logger.place.claim(Ranks(CPU))
    assert logger.folder.name == "run-12-2"


def test_last_is_of_the_same_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for moment, config in ((1, "a"), (2, "b")):
        logger = start(tmp_path, config=config)
        logger.start({}, finished_rounds=0)
        os.utime(saved(logger), ns=(moment, moment))
    for config, name in (("a", "run"), ("b", "run-2")):
        place = RunLogger(str(tmp_path), "run").place
        place.config = config
        assert place.resume_newest(trains=True) == tmp_path / name / "checkpoints" / "last.ckpt"
    place = RunLogger(str(tmp_path), "run").place
    with caplog.at_level(logging.WARNING):
        assert place.resume_newest(trains=True) is None
    assert "run-2 has this name, but another configuration" in caplog.text
    place = RunLogger(str(tmp_path), "run").place
    newest = tmp_path / "run-2" / "checkpoints" / "last.ckpt"
    assert place.resume_newest(trains=False) == newest, "to be evaluated"


def test_last_finds_the_folders_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, 12)
    saved(start(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID")
    place = RunLogger(str(tmp_path), "run").place
    place.config = "c"
    assert place.resume_newest(trains=True) == tmp_path / "run-12" / "checkpoints" / "last.ckpt"


def test_a_corrupt_environment_is_none(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        (tmp_path / "environment.json").write_text(text)
        assert read_record(tmp_path) == {}


class SecondRank(Ranks):
    """Whose first rank has found a run, and which hears of it."""

    def __init__(self, found: str | None) -> None:
        super().__init__(CPU)
        self.found = found

    @override
    def broadcast(self, obj: Any) -> Any:
        return self.found


@pytest.mark.parametrize("found", ["run-7", None])
def test_ranks_that_see_different_disks_say_so(tmp_path: Path, found: str | None) -> None:
    place = RunLogger(str(tmp_path), "run").place
    if found is None:
        place.name = "run-7"
    with pytest.raises(UserError, match=r"trainer\.default_root_dir: the ranks do not find"):
        place.claim(SecondRank(found))
    assert list(tmp_path.iterdir()) == []


# A whole run.


def line_federation() -> Federation:
    return Federation(FedAvg(), [ClientGroup(2, Line)], optimizer=SGD_HALF)


class Stops(L.Callback):
    """Ends the run after its second round."""

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def test_a_requeued_script_has_the_state_of_its_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_data([4, 4], features=2)
    rows = []
    for restarts in (0, 1):
        job(monkeypatch, 12, restarts=restarts)
        federation = line_federation()
        flags = {"logger": True, "default_root_dir": str(tmp_path), "callbacks": [Stops()]}
        trainer = fit(federation, data, tmp_path, rounds=5, **flags)
        rows.append(server_row(federation))
        assert trainer.current_epoch == 2
    assert torch.equal(*rows)
    metrics = (tmp_path / "FedAvg-Tensors-s0-12" / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in metrics] == ["round", "1", "2"]


def test_the_same_command_in_a_job_finds_the_run_finished_and_a_longer_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("build", "print_summary"):  # takes seconds
        monkeypatch.setattr(f"lightfed.lab.report.page.{name}", lambda folder: None)
    (tmp_path / "a.yaml").write_text(edited({"trainer.max_epochs": 1}))
    words = ["fit", "--config", "a.yaml"]
    for restarts, extra, said in (
        (0, [], False),
        (1, [], True),
        (1, ["--trainer.max_epochs", "2"], False),
        (1, ["--trainer.max_epochs", "2"], True),
    ):
        job(monkeypatch, 12, restarts=restarts)
        main([*words, *extra])
        assert ("runs/a-12 is finished" in capsys.readouterr().out) == said
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["a-12"]
    metrics = (tmp_path / "runs" / "a-12" / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in metrics] == ["round", "1", "2"]


def test_other_errors_of_files_pass(tmp_path: Path) -> None:
    logger = RunLogger(str(tmp_path / "runs"), "run")
    foreign = OSError(errno.EIO, "Input/output error", str(tmp_path / "data"))
    for error in (foreign, OSError(errno.EACCES, "Permission denied")):
        with pytest.raises(OSError, match=error.strerror) as passed, logger.writing():
            raise error
        assert passed.value is error
    own = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "runs" / "run" / "x"))
    with pytest.raises(DiskError, match=r"x cannot be written \(Disk quota"), logger.writing():
        raise own


def test_a_run_that_gives_up_takes_the_folders_that_it_has_made_with_it(tmp_path: Path) -> None:
    """But not one that was there, or that holds another run."""
    alone = start(tmp_path / "new" / "runs")
    alone.place.give_up()
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "runs").mkdir()
    start(tmp_path / "runs").place.give_up()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]

    first = start(tmp_path / "shared")
    second = start(tmp_path / "shared", name="other")
    first.place.give_up()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["other"]
    second.place.give_up()
