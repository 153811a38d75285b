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

_ENDING = ("PREEMPTED", "TIMEOUT", "NODE_FAIL")  # by SLURM, not by its user
_ENDING_REASONS = ("TimeLimit", "NodeFail", "NodeDown", "Preempted", "Preemption")
_WAITING = ("PENDING", "REQUEUED")
_RESTARTS = 5  # without progress
_TOO_SHORT = "so its time is too short; submit with a longer --time, or an earlier --signal"
_GO_ON = "the same command with --ckpt_path last continues from there"
_PATIENCE = 60  # seconds for scontrol: the controller may be busy or restarting
# Seconds to wait to be killed, by signal. SIGTERM is followed by SIGKILL anyway, perhaps soon.
_SECONDS = {Signals.SIGUSR1: 120.0, Signals.SIGTERM: 10.0, Signals.SIGINT: 0.0}


@dataclass(frozen=True)
class Outcome:
    """Whether a job runs again by itself, a clause that says so, and if SLURM kills it still."""

    requeued: bool
    said: str
    kills: bool = False


def requeue(job: Job, *, progressed: bool = True, run: Run = subprocess.run) -> Outcome:
    """Requeue a job, unless its user is cancelling it.

    `scontrol requeue` would revive a cancelled job. SLURM sends SIGTERM on cancellation too, so the
    state is queried first. While processes are being killed the state is COMPLETING, and the reason
    distinguishes a time limit from a cancellation. If SLURM or an operator has already requeued the
    job, its restart count is higher than its processes know. `progressed` says whether a session
    was finished since the job was started. `run` is as subprocess.run.
    """
    name = f"job {job.name}"
    shown = _scontrol(run, "show", "job", "-o", job.name)
    if shown.returncode:
        return Outcome(False, f"{name} is not requeued: {_words(shown)}")
    fields = dict(reversed(re.findall(r"(\w+)=(\S*)", shown.stdout)))  # the first of a name counts
    state = fields.get("JobState", "")
    if int(fields.get("Restarts", 0)) > job.restarts or state in _WAITING:
        return Outcome(True, f"{name} is back in the queue")
    if fields.get("BatchFlag") == "0":
        return Outcome(False, f"{name} is not a batch job and cannot be requeued")
    ending = state in _ENDING or fields.get("Reason") in _ENDING_REASONS
    if state != "RUNNING" and not ending:
        return Outcome(False, f"{name} is being cancelled")
    if not progressed and job.restarts >= _RESTARTS:
        found = f"no session has finished since restart {job.restarts}, {_TOO_SHORT}"
        return Outcome(False, f"{name} is not requeued: {found}")
    done = _scontrol(run, "requeue", job.name)
    if done.returncode and "pending" not in _words(done):
        fix = "; submit with --requeue" if done.returncode > 0 else ""
        return Outcome(False, f"{name} is not requeued: {_words(done)}{fix}")
    return Outcome(True, f"{name} is requeued", kills=True)


def is_running(job: Job, step: str, *, run: Run = subprocess.run) -> bool:
    """Whether a step of a job runs now; False also where scontrol does not know.

    `run` is as subprocess.run.
    """
    shown = _scontrol(run, "show", "step", "-o", f"{job.name}.{step}")
    return shown.returncode == 0 and re.search(r"\bState=RUNNING\b", shown.stdout) is not None


def _scontrol(run: Run, *words: str) -> "subprocess.CompletedProcess[str]":
    """What scontrol answers; a process of status -1, with the reason, if it does not."""
    command = ["scontrol", *words]
    try:
        return run(command, timeout=_PATIENCE, capture_output=True, text=True, check=False)
    except OSError as error:
        failure = f"scontrol cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        failure = "scontrol does not answer"
    return subprocess.CompletedProcess(command, -1, failure, "")


def _words(done: "subprocess.CompletedProcess[str]") -> str:
    return " ".join(f"{done.stdout} {done.stderr}".split()) or f"scontrol ends {done.returncode}"


def leave(
    interrupted: Interrupted, *, first: bool, environ: Mapping[str, str] = os.environ
) -> NoReturn:
    """End the process of an unfinished run, with status 128 + signal.

    In a requeued job it waits to be killed: the script must not reach its next command, and a rank
    that exits early must not take rank 0 with it. The first rank prints and requeues.
    """
    signal = Signals(interrupted.signal_number)
    job = job_of(environ)
    signals.forget()
    waits = job is not None and interrupted.resumable  # other ranks do not know the outcome
    if first:
        outcome = _outcome(interrupted, job)
        said = f"lightfed: stopped by {signal.name} after {interrupted.saved}; {outcome.said}"
        print(said, file=sys.stderr, flush=True)
        waits = outcome.kills
    limit = monotonic() + _SECONDS[signal]
    while waits and signals.asked() is None and monotonic() < limit:
        sleep(0.1)
    sys.exit(128 + signal)


def _outcome(interrupted: Interrupted, job: Job | None) -> Outcome:
    if not interrupted.resumable:
        return Outcome(False, "nothing is saved, because the run has no checkpoint")
    if job is None or interrupted.signal_number == Signals.SIGINT:  # its user is there
        return Outcome(False, _GO_ON)
    outcome = requeue(job, progressed=interrupted.progressed)
    ends = " and continues from there" if outcome.requeued else f"; {_GO_ON}"
    return replace(outcome, said=outcome.said + ends)
