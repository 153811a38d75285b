"""How an interrupted run exits: it requeues its SLURM job and exits with a non-zero status.

The job states checked here were observed on SLURM 22.05 with a time limit, preemption,
`scontrol requeue` and `scancel`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from signal import Signals
from time import monotonic, sleep
from typing import NoReturn

from lightfed.distributed.slurm import Job, job_of
from lightfed.utils import signals
from lightfed.utils.errors import Interrupted

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# States and reasons of a job that SLURM ends, and not its user.
_ENDING_STATES = ("PREEMPTED", "TIMEOUT", "NODE_FAIL")
_ENDING_REASONS = ("TimeLimit", "NodeFail", "NodeDown", "Preempted", "Preemption")

_WAITING_STATES = ("PENDING", "REQUEUED")

# A job that has finished no session in its last start is not requeued after so many restarts.
_MOST_RESTARTS = 5

# Seconds that scontrol has: the controller can be busy, or restarting.
_SECONDS_FOR_SCONTROL = 60

# Status that stands for a scontrol that could not be asked.
_NO_ANSWER = -1

# Seconds to wait to be killed, by signal. SIGKILL follows SIGTERM anyway, perhaps soon. After
# Ctrl-C nobody kills.
_SECONDS_TO_WAIT = {Signals.SIGUSR1: 120.0, Signals.SIGTERM: 10.0, Signals.SIGINT: 0.0}

_HOW_TO_CONTINUE = "the same command with --ckpt_path last continues from there"


@dataclass(frozen=True)
class Outcome:
    """What becomes of the job of an interrupted run.

    Attributes:
        requeued: Whether it runs again by itself.
        said: A clause for the user that says so, or why not.
        kills: Whether SLURM is going to kill the processes of this start.
    """

    requeued: bool
    said: str
    kills: bool = False


def requeue(job: Job, *, progressed: bool = True, run: Run = subprocess.run) -> Outcome:
    """Requeue a job, unless its user is cancelling it.

    `scontrol requeue` would revive a cancelled job. SLURM sends SIGTERM on cancellation, too, so
    the state is queried first.

    Args:
        job: The job.
        progressed: Whether a session has finished since this start of the job.
        run: Runs a command as `subprocess.run` does.
    """
    name = f"job {job.name}"
    shown = scontrol(run, "show", "job", "-o", job.name)
    if shown.returncode != 0:
        return Outcome(False, f"{name} is not requeued: {_text_of(shown)}")

    # If a name is there several times, the first one counts.
    fields = dict(reversed(re.findall(r"(\w+)=(\S*)", shown.stdout)))
    state = fields.get("JobState", "")

    # If SLURM or an operator has requeued the job, its restart count is higher than its processes
    # know.
    if int(fields.get("Restarts", 0)) > job.restarts or state in _WAITING_STATES:
        return Outcome(True, f"{name} is back in the queue")

    if fields.get("BatchFlag") == "0":
        return Outcome(False, f"{name} is not a batch job and cannot be requeued")

    # While processes are being killed, the state is COMPLETING. Then only the reason distinguishes
    # a time limit from a cancellation.
    is_ended_by_slurm = state in _ENDING_STATES or fields.get("Reason") in _ENDING_REASONS
    if state != "RUNNING" and not is_ended_by_slurm:
        return Outcome(False, f"{name} is being cancelled")

    if not progressed and job.restarts >= _MOST_RESTARTS:
        return Outcome(
            False,
            f"{name} is not requeued: no session has finished since restart {job.restarts}, "
            "so its time is too short; submit with a longer --time, or an earlier --signal",
        )

    requeued = scontrol(run, "requeue", job.name)
    is_pending = "pending" in _text_of(requeued)
    if requeued.returncode != 0 and not is_pending:
        clause = f"{name} is not requeued: {_text_of(requeued)}"
        if requeued.returncode > 0:
            # scontrol has answered, and does not want to.
            clause += "; submit with --requeue"
        return Outcome(False, clause)
    return Outcome(True, f"{name} is requeued", kills=True)


def is_running(job: Job, step: str, *, run: Run = subprocess.run) -> bool:
    """Return whether a step of a job is running; False if scontrol does not know.

    Args:
        job: The job.
        step: The number of the step.
        run: Runs a command as `subprocess.run` does.
    """
    shown = scontrol(run, "show", "step", "-o", f"{job.name}.{step}")
    return shown.returncode == 0 and re.search(r"\bState=RUNNING\b", shown.stdout) is not None


def scontrol(run: Run, *words: str) -> "subprocess.CompletedProcess[str]":
    """Ask scontrol.

    Returns:
        The process of scontrol. If it could not be asked, a process of status `_NO_ANSWER` with the
        reason as its output.
    """
    command = ["scontrol", *words]
    try:
        return run(
            command, timeout=_SECONDS_FOR_SCONTROL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        reason = f"scontrol cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        reason = "scontrol does not answer"
    return subprocess.CompletedProcess(command, _NO_ANSWER, reason, "")


def _text_of(process: "subprocess.CompletedProcess[str]") -> str:
    """Return what a process has printed, on one line."""
    text = " ".join(f"{process.stdout} {process.stderr}".split())
    return text if text else f"scontrol ends with status {process.returncode}"


def leave(
    interrupted: Interrupted, *, first: bool, environ: Mapping[str, str] = os.environ
) -> NoReturn:
    """End the process of an unfinished run, with status 128 + signal.

    In a requeued job it waits to be killed: the script must not reach its next command, and a rank
    that exits early must not take rank 0 with it.

    Args:
        interrupted: What has stopped the run, and what is saved.
        first: Whether this is the first rank, which requeues the job and tells the user.
        environ: The variables of the process.
    """
    signal = Signals(interrupted.signal_number)
    job = job_of(environ)

    # From here on, another signal ends the wait.
    signals.forget()

    if first:
        outcome = _outcome(interrupted, job)
        print(
            f"lightfed: stopped by {signal.name} after {interrupted.saved}; {outcome.said}",
            file=sys.stderr,
            flush=True,
        )
        waits = outcome.kills
    else:
        # The other ranks do not know the outcome.
        waits = job is not None and interrupted.resumable

    deadline = monotonic() + _SECONDS_TO_WAIT[signal]
    while waits and signals.asked() is None and monotonic() < deadline:
        sleep(0.1)
    sys.exit(128 + signal)


def say_pause(interrupted: Interrupted) -> None:
    """Tell the user that a run has stopped where it was asked to.

    Args:
        interrupted: What is saved.
    """
    how = "the same command without --pause_after, with --ckpt_path last, goes on"
    if not interrupted.resumable:
        how = "nothing is saved, because the run has no checkpoint"
    print(f"lightfed: paused after {interrupted.saved}; {how}", file=sys.stderr, flush=True)


def _outcome(interrupted: Interrupted, job: Job | None) -> Outcome:
    """Requeue the job of an interrupted run if that is of use, and return what becomes of it."""
    if not interrupted.resumable:
        return Outcome(False, "nothing is saved, because the run has no checkpoint")

    # After Ctrl-C the user is there and decides.
    if job is None or interrupted.signal_number == Signals.SIGINT:
        return Outcome(False, _HOW_TO_CONTINUE)

    outcome = requeue(job, progressed=interrupted.progressed)
    if outcome.requeued:
        return replace(outcome, said=f"{outcome.said} and continues from there")
    return replace(outcome, said=f"{outcome.said}; {_HOW_TO_CONTINUE}")
