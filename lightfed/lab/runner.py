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
from lightfed.cli.dependencies import Opened
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
        wanted: The run.
        status: The exit status; 0 also for a run that was finished before.
        seconds: How long it took; 0 if nothing ran.
        said: The error; empty if there is none.
    """

    wanted: Wanted
    status: int
    seconds: float
    said: str


# Checks.


def check(commands: Sequence[Sequence[str]]) -> list[Wanted | UserError]:
    """Read all commands in a child process; a mistake in one is returned in its place."""
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
    opened = Opened()
    for words in commands:
        try:
            wanted = Wanted.of(words)
        except UserError as error:
            sender.send(error)
            continue
        sender.send(wanted._replace(files=opened.digests()))


# Runs.


def run_all(runs: Sequence[Wanted], jobs: int = 1) -> Iterator[Outcome]:
    """Run what is not finished, `jobs` at once, and resume what was stopped.

    A run that another command trains is waited for, and not trained here. After a signal, the runs
    under way save and stop, and no others begin.

    Yields:
        What became of each run, as soon as it ends.
    """
    queue = _Queue(runs, jobs)
    with listening():
        while queue.may_begin_more or queue.running:
            yield from queue.begin()
            # Without children there is nothing to wait for: `retry` sleeps if need be.
            wait([process.sentinel for process in queue.running], _POLL if queue.running else 0.0)
            yield from queue.retry()
            queue.pass_signals_on()
            yield from queue.collect()


class _Child(NamedTuple):
    """A run under way in a child process.

    Attributes:
        wanted: The run.
        log: The file of its output.
        begun: When it began, by `time.monotonic`.
    """

    wanted: Wanted
    log: Path
    begun: float


class _Queue:
    """The runs of one call of `run_all` that have not ended.

    Attributes:
        jobs: How many may be under way at once.
        waiting: Those that have not begun.
        elsewhere: Those that other commands on this folder train.
        running: Those under way here, by their process.
    """

    def __init__(self, runs: Sequence[Wanted], jobs: int) -> None:
        self.jobs = jobs
        self.waiting = list(runs)
        self.elsewhere: list[Wanted] = []
        self.running: dict[BaseProcess, _Child] = {}
        self._passed_on: int | None = None  # the last signal that the children know of

    @property
    def may_begin_more(self) -> bool:
        """Whether runs are left, and no signal has asked to stop."""
        return bool(self.waiting or self.elsewhere) and asked() is None

    @property
    def _has_room(self) -> bool:
        return len(self.running) < self.jobs

    def begin(self) -> Iterator[Outcome]:
        """Begin as many runs as there is room for; yield those that were finished before."""
        while self.waiting and asked() is None and self._has_room:
            wanted = self.waiting.pop(0)

            # A finished run may still have a lock: of a training that is about to end, or that has
            # outlived its command.
            lock = None
            if wanted.finished() is None or run_locks.path_of(wanted).exists():
                lock = run_locks.take(wanted)
                if lock is None:
                    self.elsewhere.append(wanted)
                    continue

            # Asked again, because it may have finished while the lock was taken.
            if wanted.finished() is not None:
                yield Outcome(wanted, 0, 0.0, "")
                _drop(lock, wanted)
                continue

            assert lock is not None, "a run that is not finished is locked"
            process, log = _start(wanted, lock)
            self.running[process] = _Child(wanted, log, time.monotonic())

    def retry(self) -> Iterator[Outcome]:
        """Take back the runs that other commands do not train any more, once there is room."""
        if not self.elsewhere or self.waiting or not self._has_room:
            return

        ended = [wanted for wanted in self.elsewhere if not _is_elsewhere(wanted)]
        self.elsewhere = [wanted for wanted in self.elsewhere if wanted not in ended]
        for wanted in ended:
            if wanted.finished() is None and wanted.diverged.exists():
                # The same bits would diverge here, too.
                yield Outcome(wanted, UserError.status, 0.0, _last_words(wanted.diverged))
            else:
                self.waiting.append(wanted)

        if not ended and not self.running:
            time.sleep(_POLL)

    def pass_signals_on(self) -> None:
        """Send the children what this process was sent, once."""
        if asked() == self._passed_on:
            return
        self._passed_on = asked()
        # A terminal sends SIGINT to the children by itself.
        if self._passed_on == SIGINT:
            return
        for process in self.running:
            assert process.pid is not None
            os.kill(process.pid, self._passed_on or 0)

    def collect(self) -> Iterator[Outcome]:
        """Yield what became of the children that have ended."""
        ended = [process for process in self.running if not process.is_alive()]
        for process in ended:
            wanted, log, begun = self.running.pop(process)
            yield _outcome(wanted, process, log, time.monotonic() - begun)
            run_locks.clear(wanted)


def _drop(lock: int | None, wanted: Wanted) -> None:
    """Give a lock back, if there is one, and remove its file."""
    if lock is not None:
        os.close(lock)
        run_locks.clear(wanted)


def _is_elsewhere(wanted: Wanted) -> bool:
    """Whether another process trains a run now."""
    lock = run_locks.take(wanted)
    _drop(lock, wanted)
    return lock is None


# A child.


def _import_all() -> None:
    """Import what every run needs, before anything is forked; a second call is free."""
    if "lightfed.cli.federation_cli" in sys.modules and "lightfed.lab.report.page" in sys.modules:
        return
    imports_begin()
    import lightfed.cli.federation_cli
    import lightfed.lab.report.page  # noqa: F401

    imports_end()


def _start(wanted: Wanted, lock: int) -> tuple[BaseProcess, Path]:
    """Start a child that runs the command and holds its lock; also return its log."""
    # Not before, because a list whose runs are finished needs none of it.
    _import_all()
    log = wanted.root / LOGS / f"{wanted.name}-{time.time_ns()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()  # otherwise the child would write the same text once more
    process = _FORK.Process(target=_become, args=(wanted.resumed(), wanted.ranks, log, lock))
    process.start()
    os.close(lock)  # the child has it now, so that it lasts as long as the training
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
    """What became of a child that has ended; removes its log, unless somebody may need it."""
    process.join()
    code = process.exitcode or 0
    status = 128 - code if code < 0 else code  # killed by signal -code, as a shell says it

    if status == 0 and wanted.finished() is None:
        # What runs in the child may end it at once, as os._exit(0) does, and nobody hears of it.
        found = "the process ended with status 0, but the run has not finished"
        return Outcome(wanted, 1, seconds, f"{found} (output: {log})")
    if status == 0:
        log.unlink()
        wanted.diverged.unlink(missing_ok=True)
        return Outcome(wanted, 0, seconds, "")

    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    of_lightfed = [line for line in lines if line.startswith(_OURS)]
    if not of_lightfed:
        return Outcome(wanted, status, seconds, f"{' '.join(lines[-1:])} (output: {log})")

    said = _without_prefixes(of_lightfed[-1])
    if NOT_FINITE in said:
        log.rename(wanted.diverged)
    else:
        log.unlink()
    return Outcome(wanted, status, seconds, said)


def _last_words(log: Path) -> str:
    """The last line of a log that is not empty, without what every error begins with."""
    lines = [line for line in log.read_text("utf-8", "replace").split("\n") if line.strip()]
    return _without_prefixes(lines[-1]) if lines else ""


def _without_prefixes(line: str) -> str:
    return line.removeprefix(_OURS).removeprefix("error: ")
