"""Runs many commands from one process that has imported everything once.

This process never computes: it forks for the checks, and for every run. A child begins as a fresh
process does after its imports, so that its run has the bits of the same run alone. A run of several
ranks replaces its child by a new process.
"""

import multiprocessing as mp
import os
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGINT
from typing import NamedTuple

from lightfed.cli import run_locks
from lightfed.cli.wanted import LOGS, Wanted
from lightfed.utils.errors import NOT_FINITE, UserError
from lightfed.utils.process import imports_begin, imports_end
from lightfed.utils.signals import asked, listening

_FORK = mp.get_context("fork")
_POLL = 0.5  # seconds between two looks for a signal
_OURS = "lightfed: "  # begins what the command says at its end


class Outcome(NamedTuple):
    """What became of a command.

    Attributes:
        wanted: the run.
        status: exit status; 0 also for a run that was finished before.
        seconds: that it took; 0 if nothing ran.
        said: the error, or nothing.
    """

    wanted: Wanted
    status: int
    seconds: float
    said: str


def check(commands: Sequence[Sequence[str]]) -> list[Wanted | UserError]:
    """Read all commands in a child: a mistake in one is returned in its place."""
    _import_all()
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_check, args=(commands, sender))
    child.start()
    sender.close()
    try:
        return [receiver.recv() for _ in commands]
    except EOFError:
        raise SystemExit(1) from None  # the child has said why
    finally:
        child.join()


def _check(commands: Sequence[Sequence[str]], sender: Connection) -> None:
    for words in commands:
        try:
            sender.send(Wanted.of(words))
        except UserError as error:
            sender.send(error)


def run_all(runs: Sequence[Wanted], jobs: int = 1) -> Iterator[Outcome]:
    """Run what is not finished, `jobs` at once, and resume what was stopped; as each one ends.

    A run that another command trains is waited for, and not trained here. After a signal, the
    running ones save and stop, and no others begin.
    """
    _import_all()
    left = list(runs)
    elsewhere: list[Wanted] = []  # of other commands on this folder
    running: dict[BaseProcess, tuple[Wanted, Path, float]] = {}
    passed_on: int | None = None
    with listening():
        while ((left or elsewhere) and asked() is None) or running:
            while left and asked() is None and len(running) < jobs:
                wanted = left.pop(0)
                lock = None if wanted.finished() is not None else run_locks.take(wanted)
                if wanted.finished() is not None:  # perhaps while the lock was taken
                    yield Outcome(wanted, 0, 0.0, "")
                    _drop(lock, wanted)
                elif lock is None:
                    elsewhere.append(wanted)
                else:
                    process, log = _start(wanted, lock)
                    running[process] = wanted, log, time.monotonic()
            wait([process.sentinel for process in running], _POLL if running else 0.0)
            if elsewhere and not left and len(running) < jobs:
                ended = [wanted for wanted in elsewhere if not _is_elsewhere(wanted)]
                elsewhere = [wanted for wanted in elsewhere if wanted not in ended]
                for wanted in ended:
                    if wanted.finished() is None and wanted.diverged.exists():
                        yield Outcome(wanted, UserError.status, 0.0, _last_words(wanted.diverged))
                    else:
                        left.append(wanted)
                if not ended and not running:
                    time.sleep(_POLL)
            if asked() != passed_on:
                passed_on = asked()
                # A terminal sends SIGINT to the children by itself.
                for process in running if passed_on != SIGINT else ():
                    assert process.pid is not None
                    os.kill(process.pid, passed_on or 0)
            for process in [p for p in running if not p.is_alive()]:
                wanted, log, begun = running.pop(process)
                yield _outcome(wanted, process, log, time.monotonic() - begun)
                run_locks.clear(wanted)


def _drop(lock: int | None, wanted: Wanted) -> None:
    """Give a lock back, and remove its file."""
    if lock is not None:
        os.close(lock)
        run_locks.clear(wanted)


def _is_elsewhere(wanted: Wanted) -> bool:
    """Whether another process trains a run now."""
    lock = run_locks.take(wanted)
    _drop(lock, wanted)
    return lock is None


def _last_words(log: Path) -> str:
    """The last line of a log."""
    lines = log.read_text("utf-8", "replace").split("\n")
    said = [line for line in lines if line.strip()][-1:]
    return "".join(said).removeprefix(_OURS).removeprefix("error: ")


def _import_all() -> None:
    imports_begin()
    import lightfed.cli.federation_cli
    import lightfed.lab.report.page  # noqa: F401

    imports_end()


def _start(wanted: Wanted, lock: int) -> tuple[BaseProcess, Path]:
    """A child that runs the command and has its lock, and the file of its output."""
    log = wanted.root / LOGS / f"{wanted.name}-{time.time_ns()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()  # else the child would write it, too
    process = _FORK.Process(target=_become, args=(wanted.resumed(), wanted.ranks, log, lock))
    process.start()
    os.close(lock)  # it is the child's now: it lasts as long as the training
    return process, log


def _become(words: list[str], ranks: int, log: Path, lock: int) -> None:
    """Run a command in this process, a child, as if it had been started for that."""
    from lightfed.cli.command_line import main

    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    if ranks > 1:
        os.set_inheritable(lock, True)
        os.execv(sys.executable, [sys.executable, "-m", "lightfed", *words])
    sys.argv[1:] = words
    main()


def _outcome(wanted: Wanted, process: BaseProcess, log: Path, seconds: float) -> Outcome:
    process.join()
    code = process.exitcode or 0
    status = 128 - code if code < 0 else code
    if not status and wanted.finished() is None:
        # What runs in the child may end it at once, as os._exit(0) does, and nobody hears of it.
        found = "the process ended with status 0, and the run has not reached its limits"
        return Outcome(wanted, 1, seconds, f"{found} (output: {log})")
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    ours = [line.removeprefix(_OURS) for line in lines if line.startswith(_OURS)]
    if not status or ours:
        said = ours[-1].removeprefix("error: ") if status else ""
        if NOT_FINITE in said:
            log.rename(wanted.diverged)
            return Outcome(wanted, status, seconds, said)
        log.unlink()
        if not status:
            wanted.diverged.unlink(missing_ok=True)
        return Outcome(wanted, status, seconds, said)
    return Outcome(wanted, status, seconds, f"{' '.join(lines[-1:])} (output: {log})")
