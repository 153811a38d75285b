"""How an interrupted run leaves: its SLURM job goes back into the queue, and the status is not 0.

The states of a job that decide were seen on SLURM 22.05 with a time limit, preemption,
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
from typing import Any, NoReturn

from lightfed.distributed.slurm import Job, job_of
from lightfed.utils import signals
from lightfed.utils.errors import Interrupted

Run = Callable[..., "subprocess.CompletedProcess[str]"]

_ENDING = ("PREEMPTED", "TIMEOUT", "NODE_FAIL")  # by SLURM, not by its user
_ENDING_REASONS = ("TimeLimit", "NodeFail", "NodeDown", "Preempted", "Preemption")
_WAITING = ("PENDING", "REQUEUED")
_RESTARTS = 5  # without progress
_TOO_SHORT = "so its time is too short; submit with a longer --time, or an earlier --signal"
_UNSOUND = "for its nodes fail sooner; submit with --exclude, or see what ends them"
_GO_ON = "the same command with --ckpt_path last goes on from there"
_PATIENCE = 60  # seconds for scontrol, whose controller may be busy or be restarted
# To be killed in, by signal; behind SIGTERM there is a killer already, and it may be in a hurry.
_SECONDS = {Signals.SIGUSR1: 120.0, Signals.SIGTERM: 10.0}


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        requeued: whether it runs again by itself.
        said: about it, as a clause.
        kills: whether SLURM has yet to end its processes.
    """

    requeued: bool
    said: str
    kills: bool = False


def requeue(
    job: Job,
    *,
    progressed: bool = True,
    why_not: str = _TOO_SHORT,
    run: Run = subprocess.run,
) -> Outcome:
    """Put a job back into the queue, unless its user is just cancelling it.

    `scontrol requeue` would raise a cancelled job from the dead: SLURM sends SIGTERM then, too, so
    the state is asked for first. While processes are being killed it is COMPLETING, and its reason
    tells a time limit from a user; a job that SLURM or an operator has requeued already has one
    restart more than its processes know of.

    Args:
        job: of this process.
        progressed: whether a session was finished since the job was started.
        why_not: what to say of a job that has started often enough without progress.
        run: as subprocess.run.
    """
    name = f"job {job.name}"
    try:
        shown = _scontrol(run, "show", "job", "-o", job.name)
    except OSError as error:
        return Outcome(False, f"{name} is not requeued: scontrol cannot be run ({error.strerror})")
    except subprocess.TimeoutExpired:
        return Outcome(False, f"{name} is not requeued: scontrol does not answer")
    if shown.returncode:
        return Outcome(False, f"{name} is not requeued: {_words(shown)}")
    told = dict(reversed(re.findall(r"(\w+)=(\S*)", shown.stdout)))  # the first of a name counts
    state = told.get("JobState", "")
    if int(told.get("Restarts", 0)) > job.restarts or state in _WAITING:
        return Outcome(True, f"{name} is in the queue again")
    if told.get("BatchFlag") == "0":
        return Outcome(False, f"{name} is no batch job and cannot be requeued")
    ending = state in _ENDING or told.get("Reason") in _ENDING_REASONS
    if state != "RUNNING" and not ending:
        return Outcome(False, f"{name} is being cancelled")
    if not progressed and job.restarts >= _RESTARTS:
        said = f"not a session was finished since restart {job.restarts}"
        return Outcome(False, f"{name} is not requeued: {said}, {why_not}")
    return _requeue(name, job, run)


def _requeue(name: str, job: Job, run: Run) -> Outcome:
    try:
        done = _scontrol(run, "requeue", job.name)
    except (OSError, subprocess.TimeoutExpired):
        return Outcome(False, f"{name} is not requeued: scontrol does not answer")
    if done.returncode and "pending" not in _words(done):
        return Outcome(False, f"{name} is not requeued: {_words(done)}; submit with --requeue")
    return Outcome(True, f"{name} is requeued", kills=True)


def _scontrol(run: Run, *words: str) -> "subprocess.CompletedProcess[str]":
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    return run(["scontrol", *words], timeout=_PATIENCE, **options)


def _words(done: "subprocess.CompletedProcess[str]") -> str:
    return " ".join(f"{done.stdout} {done.stderr}".split()) or f"scontrol ends {done.returncode}"


def leave(
    interrupted: Interrupted, *, first: bool, environ: Mapping[str, str] = os.environ
) -> NoReturn:
    """End the process of a run that is not finished, with status 128 + signal.

    In a job that is requeued it waits to be killed: the script must not come to its next command,
    nor may a rank that leaves early take rank 0 with it.

    Args:
        interrupted: by what.
        first: whether this is rank 0, which speaks and requeues.
        environ: of the process.
    """
    signal = Signals(interrupted.signal_number)
    job = job_of(environ)
    signals.forget()
    waits = job is not None and interrupted.resumable  # the other ranks do not hear what became
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
        return Outcome(False, "nothing is saved, for the run keeps no checkpoints")
    if job is None:
        return Outcome(False, _GO_ON)
    outcome = requeue(job, progressed=interrupted.progressed)
    ends = " and goes on from there" if outcome.requeued else f"; {_GO_ON}"
    return replace(outcome, said=outcome.said + ends)


def after_node_loss(*, progressed: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Requeue the job of a run that has lost a node, before SLURM sees it end with an error.

    Args:
        progressed: whether a round was saved since the job was started.
        environ: of the process.

    Returns:
        what becomes of the run, as a clause; "" outside a job.
    """
    job = job_of(environ)
    if job is None:
        return ""
    outcome = requeue(job, progressed=progressed, why_not=_UNSOUND)
    ends = " and goes on from its last checkpoint" if outcome.requeued else f"; {_GO_ON}"
    return outcome.said + ends
