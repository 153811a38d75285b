"""The runs that a contest lacks: they are run here, or submitted, and all are read."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightfed.cli import run_locks
from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.results.run import Run, read
from lightfed.utils.errors import UserError


class Way(NamedTuple):
    """How missing runs are run: on this machine, or submitted to a queue.

    Attributes:
        jobs: How many at once; None for one on this machine, or all of an array.
        slurm: Whether to submit them as an array. The contest then ends for now.
        seconds: The CPU time of a run, if somebody has measured it.
        trains: Whether missing runs may be run. If not, `Missing` is raised instead.
    """

    jobs: int | None
    slurm: bool
    seconds: float | None = None
    trains: bool = True


class Needed(NamedTuple):
    """A column of metrics.csv without which a question has no answer.

    Attributes:
        key: Where the user has named it.
        column: The column.
        methods: The methods whose runs must have it; None for all.
    """

    key: str
    column: str
    methods: tuple[str, ...] | None = None

    def check(self, run: Run, method: str) -> None:
        """Raise a UserError if a run of a method must have the column, and has not."""
        is_of_it = self.methods is None or method in self.methods
        if is_of_it and not run.has(self.column):
            raise UserError(
                self.key, f"{self.column}, which some runs do not have", "see metrics.csv"
            )


class Submitted(SystemExit):
    """Missing runs wait in a queue: the contest can be held once they have ended."""


class Missing(Exception):
    """A run is missing, and nothing may be run yet."""


def run_missing(
    runs: Sequence[tuple[str, Wanted]],
    way: Way,
    needed: Sequence[Needed],
    *,
    all_of_them: bool = True,
) -> list[Run | None]:
    """Run what is missing and read all; end the process if a run fails, or after a signal.

    Args:
        runs: The runs with the names of their methods; the same one may be there several times.
        way: How missing runs are run.
        needed: Columns that runs must have.
        all_of_them: Whether each is needed. If not, a run that fails is None, and is not tried
            again if it had diverged.

    Raises:
        UserError: A run has not reached its limits, or lacks a column that it must have.
        Missing: A run is missing, and may not be run.
        Submitted: What is missing has been submitted.
    """
    unique = list({wanted.identity: wanted for _, wanted in runs}.values())

    def check(ended: Wanted) -> None:
        folder = ended.finished()
        if folder is None or not needed:
            return
        run = read(folder)
        for method, wanted in runs:
            if wanted.identity == ended.identity:
                for column in needed:
                    column.check(run, method)

    missing = []
    for wanted in unique:
        # Also before anything is run, because one run says it of all.
        check(wanted)

        # The same bits would diverge again.
        is_hopeless = not all_of_them and wanted.diverged.exists()
        if wanted.finished() is None and not is_hopeless:
            missing.append(wanted)

    if missing and not way.trains:
        raise Missing
    if missing:
        cost = ""
        if way.seconds:
            seconds = way.seconds * sum(_part_of(wanted) for wanted in missing)
            cost = f", about {seconds / 60:.1f} CPU minutes"
        print(f"{len(missing)} of {len(unique)} runs are missing{cost}", file=sys.stderr)
        if way.slurm:
            submit(missing, way)
        status = sweep.run(missing, jobs=way.jobs or 1, to=sys.stderr, after=check)
        was_stopped = status > 128
        if was_stopped or (status and all_of_them):
            raise SystemExit(status)

    for wanted in unique:
        # A training that outlived another command has left its lock, and was not missing any more.
        run_locks.clear(wanted)

    read_runs: list[Run | None] = []
    for _, wanted in runs:
        folder = wanted.finished()
        read_runs.append(None if folder is None else read(folder))
    if all_of_them and None in read_runs:
        raise UserError("runs", "a run has not finished", "run the command again")
    return read_runs


def _part_of(wanted: Wanted) -> float:
    """Return which part of its rounds a run does at most before it pauses."""
    return 1.0 if wanted.pause is None else wanted.pause / wanted.limits["max_epochs"]


def submit(missing: Sequence[Wanted], way: Way) -> None:
    """Submit an array of the missing runs, and say which command shows the contest afterwards.

    Raises:
        Submitted: The array waits in the queue.
        SystemExit: sbatch has failed, with this status.
    """
    lines = [shlex.join(wanted.words) for wanted in missing]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    file = missing[0].root / f"contest-{digest}.sweep"
    file.parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("\n".join([*lines, ""]))

    status = sweep.submit(file, range(1, len(lines) + 1), (), jobs=way.jobs)
    if status:
        raise SystemExit(status)
    print(f"when the array has ended: {shlex.join(['lightfed', *sys.argv[1:]])}")
    raise Submitted(0)
