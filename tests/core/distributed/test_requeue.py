"""Requeue what SLURM ends, never what its user ends; the status is never 0.

The answers of scontrol are those of SLURM 22.05, shortened.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightfed.distributed import requeue
from lightfed.distributed.requeue import leave
from lightfed.distributed.slurm import Job, check_rank, job_of
from lightfed.utils import signals
from lightfed.utils.errors import Interrupted, UserError

JOB = Job("12", "mini", 0)
ALONE = {"SLURM_JOB_ID": "12"}


def state(name: str, *, reason: str = "None", restarts: int = 0, batch: int = 1) -> str:
    return (
        f"JobId=12 JobName=lf.sh JobState={name} Reason={reason} Dependency=(null) Requeue=1 "
        f"Restarts={restarts} BatchFlag={batch} ExitCode=0:0 Command=/x JobState=NONE Comment=a b"
    )


class Scontrol:
    """A scontrol that answers as it is stated, and keeps what it was asked."""

    def __init__(self, shown: str, *, status: int = 0, error: str = "") -> None:
        self.shown, self.status, self.error = shown, status, error
        self.asked: list[str] = []

    def __call__(self, words: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        assert words[0] == "scontrol"
        assert options["timeout"] > 0
        self.asked.append(" ".join(words[1:]))
        if words[1] == "show":
            return subprocess.CompletedProcess(words, 0, self.shown, "")
        return subprocess.CompletedProcess(words, self.status, "", self.error)


@pytest.mark.parametrize(
    "shown",
    [
        state("RUNNING"),  # SIGUSR1 ahead of the limit, and preemption within its grace time
        state("COMPLETING", reason="TimeLimit"),
        state("TIMEOUT", reason="TimeLimit"),
        state("PREEMPTED"),
        state("NODE_FAIL", reason="NodeDown"),
    ],
)
def test_what_slurm_ends_is_requeued(shown: str) -> None:
    scontrol = Scontrol(shown)
    expected = requeue.Outcome(True, "job 12 is requeued", kills=True)
    assert requeue.requeue(JOB, run=scontrol) == expected
    assert scontrol.asked == ["show job -o 12", "requeue 12"]


@pytest.mark.parametrize(
    ("shown", "requeued", "said"),
    [
        (state("COMPLETING", restarts=1), True, "is back in the queue"),  # by an operator
        (state("PENDING", restarts=1), True, "is back in the queue"),
        (state("REQUEUED"), True, "is back in the queue"),
        (state("COMPLETING"), False, "is being cancelled"),  # by its user
        (state("CANCELLED"), False, "is being cancelled"),
        (state("FAILED"), False, "is being cancelled"),
        (state("RUNNING", batch=0), False, "is not a batch job"),  # salloc has begun it
    ],
)
def test_what_others_end_is_left_alone(shown: str, requeued: bool, said: str) -> None:
    scontrol = Scontrol(shown)
    outcome = requeue.requeue(JOB, run=scontrol)
    assert (outcome.requeued, outcome.kills) == (requeued, False)
    assert said in outcome.said
    assert scontrol.asked == ["show job -o 12"]


def test_pending_already_is_fine_and_other_refusals_are_reported() -> None:
    late = Scontrol(state("RUNNING"), status=1, error="Job is pending execution for job 12\n")
    assert requeue.requeue(JOB, run=late).requeued
    disabled = "Requested operation is presently disabled for job 12\n"
    outcome = requeue.requeue(JOB, run=Scontrol(state("RUNNING"), status=1, error=disabled))
    assert not outcome.requeued
    assert disabled.strip() in outcome.said
    assert "--requeue" in outcome.said


@pytest.mark.parametrize(
    ("progressed", "restarts", "requeued"),
    [(False, 4, True), (False, 5, False), (True, 5, True), (True, 50, True)],
)
def test_a_time_limit_below_a_session_ends_the_run(
    progressed: bool, restarts: int, requeued: bool
) -> None:
    job = Job("12", "mini", restarts)
    scontrol = Scontrol(state("RUNNING", restarts=restarts))
    outcome = requeue.requeue(job, progressed=progressed, run=scontrol)
    assert outcome.requeued == requeued
    assert ("too short" in outcome.said) != requeued


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file"), subprocess.TimeoutExpired("scontrol", 60)]
)
def test_without_scontrol_the_job_ends(error: Exception) -> None:
    def run(*args: Any, **options: Any) -> Any:
        raise error

    outcome = requeue.requeue(JOB, run=run)
    assert not outcome.requeued
    assert outcome.said.startswith("job 12 is not requeued: scontrol ")


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, Job("12", "", 0)),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"}, Job("12", "", 2)),
        (
            {
                "SLURM_JOB_ID": "15",
                "SLURM_ARRAY_JOB_ID": "12",
                "SLURM_ARRAY_TASK_ID": "3",
                "SLURM_CLUSTER_NAME": "mini",
            },
            Job("12_3", "mini", 0),
        ),
        ({"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "interactive"}, None),
        ({"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "bash"}, None),
    ],
)
def test_which_job(environ: dict[str, str], job: Job | None) -> None:
    assert job_of(environ) == job


def test_a_rank_that_is_not_configured_is_refused() -> None:
    check_rank(1, 2)
    with pytest.raises(UserError) as refused:
        check_rank(2, 2)
    assert refused.value.key == "LOCAL_RANK"


# How a process leaves.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Time that passes only while somebody sleeps; what was slept."""
    slept: list[float] = []
    monkeypatch.setattr(requeue, "sleep", slept.append)
    monkeypatch.setattr(requeue, "monotonic", lambda: sum(slept))
    yield slept
    signals.forget()


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol on the PATH that says RUNNING; what it was asked is in the file."""
    asked = tmp_path / "asked"
    script = tmp_path / "scontrol"
    script.write_text(f"#!/bin/sh\necho \"$@\" >> {asked}\necho '{state('RUNNING')}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return asked


def left(number: int, environ: Mapping[str, str], *, first: bool = True) -> int:
    interrupted = Interrupted(number, "4 of 9 rounds", resumable=True)
    with pytest.raises(SystemExit) as ended:
        leave(interrupted, first=first, environ=environ)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_rank_0_requeues_and_waits_to_be_killed(
    scontrol: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert left(signal.SIGUSR1, ALONE) == 128 + signal.SIGUSR1
    assert scontrol.read_text() == "show job -o 12\nrequeue 12\n"
    assert sum(clock) == pytest.approx(120, abs=1)
    said = "lightfed: stopped by SIGUSR1 after 4 of 9 rounds; job 12 is requeued and continues"
    assert capsys.readouterr().err == f"{said} from there\n"


def test_who_is_being_killed_already_does_not_hold_the_node(
    scontrol: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    script = scontrol.with_name("scontrol")
    script.write_text(script.read_text().replace(state("RUNNING"), state("PENDING", restarts=1)))
    assert left(signal.SIGTERM, ALONE) == 128 + signal.SIGTERM
    assert not clock
    assert "job 12 is back in the queue" in capsys.readouterr().err


def test_other_ranks_wait_in_silence(
    scontrol: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert left(signal.SIGUSR1, ALONE, first=False) == 128 + signal.SIGUSR1
    assert not scontrol.exists()
    assert sum(clock) == pytest.approx(120, abs=1)
    assert capsys.readouterr().err == ""


def test_the_killer_ends_the_wait(
    scontrol: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        clock.append(seconds)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(requeue, "sleep", sleep)
    with signals.listening():
        signal.raise_signal(signal.SIGUSR1)  # is obeyed, and no reason to end the wait
        assert left(signal.SIGUSR1, ALONE) == 128 + signal.SIGUSR1
    assert len(clock) == 1


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "interactive"}])
@pytest.mark.parametrize("first", [True, False])
def test_outside_a_job_nobody_waits(
    job: dict[str, str],
    first: bool,
    scontrol: Path,
    clock: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert left(signal.SIGTERM, job, first=first) == 128 + signal.SIGTERM
    assert not clock
    assert not scontrol.exists()
    assert ("--ckpt_path last" in capsys.readouterr().err) == first


def test_a_run_without_checkpoints_is_not_requeued(scontrol: Path, clock: list[float]) -> None:
    interrupted = Interrupted(signal.SIGUSR1, "4 of 9 rounds", resumable=False)
    with pytest.raises(SystemExit):
        leave(interrupted, first=True, environ=ALONE)
    assert not scontrol.exists()
    assert not clock
