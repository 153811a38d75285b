"""Runs of a list: they are checked, run or submitted, and a line is printed for each."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import SIGINT
from typing import Any, TextIO

from lightfed.cli import run_locks
from lightfed.cli.wanted import Wanted
from lightfed.lab.results.run import primary_metric, read
from lightfed.lab.results.text import goal_text, seconds_text
from lightfed.lab.runner import Outcome, check, run_all
from lightfed.utils.errors import NOT_FINITE, UserError
from lightfed.utils.process import report

SCRIPT = Path("slurm/sweep.sbatch")


class PositiveInt(int):
    """A whole number of an option, from 1."""

    def __new__(cls, text: str) -> "PositiveInt":
        number = super().__new__(cls, text)
        if number < 1:
            raise ValueError(f"{text} is less than 1")
        return number


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that run many runs."""
    at_once = "number of runs at the same time (default: 1; with --slurm: all)"
    parser.add_argument("--jobs", type=PositiveInt, metavar="N", help=at_once)
    submit_it = "submit the missing runs as a job array, and return"
    parser.add_argument("--slurm", action="store_true", help=submit_it)


def check_json(asked: argparse.Namespace) -> None:
    """Refuse `--json` beside what it leaves no room for.

    That is `--slurm`, by which a command ends before there is a result, and files: neither with
    `--json` nor with `--markdown` is a page written that they would stand beside.

    Raises:
        UserError: Both are given.
    """
    for printed in ("json", "markdown"):
        for flag in ("format", "table", "output"):
            if getattr(asked, printed, False) and getattr(asked, flag, None):
                found = f"given beside --{printed}, with which no page and no files are written"
                raise UserError(f"--{flag}", found, "give the command once with each")
    if asked.json and asked.slurm:
        found = "given beside --slurm, by which there is no result yet"
        raise UserError("--json", found, "submit without it, and give it when the array has ended")


def checked(
    commands: Sequence[Sequence[str]], names: Sequence[str], *, twins: bool = False
) -> list[Wanted]:
    """Return what each command asks for; end the process if one of them cannot run.

    There is a line for each fault before that. Commands of the same name with the same fault, such
    as those of a method at all points of a search, share a line.

    Args:
        commands: The words of each command.
        names: What to call each command in a line about its fault.
        twins: Whether two commands may ask for the same run. Otherwise the second is a fault.
    """
    return each_once(check(commands), names, twins=twins)


def each_once(
    results: Sequence[Wanted | UserError], names: Sequence[str], *, twins: bool = False
) -> list[Wanted]:
    """Return the runs that were read; see `checked`."""
    runs = []
    reported: set[str] = set()
    first_with: dict[tuple[str, ...], str] = {}  # names by what makes a run the same
    for name, result in zip(names, results, strict=True):
        fault = None
        if isinstance(result, UserError):
            fault = result
        else:
            runs.append(result)
            first = first_with.setdefault(result.identity, name)
            if first is not name and not twins:
                fault = UserError("trainer.name", f"the run of {first}", "give it another name")
        if fault is not None:
            named = UserError(f"{name}: {fault.key}", fault.found, fault.fix)
            if named.line not in reported:
                report(named)
            reported.add(named.line)

    if reported:
        sys.exit(UserError.status)
    return runs


def run(
    runs: Sequence[Wanted],
    *,
    jobs: int,
    to: TextIO | None = None,
    after: Callable[[Wanted], None] | None = None,
    outcomes: list[Outcome] | None = None,
) -> int:
    """Run what is missing, and print a line for each run when it has ended.

    Args:
        runs: The runs; those that are finished get a line, too.
        jobs: How many at once.
        to: Where the lines go; by default standard output.
        after: Called with each run that has ended well. If it raises, no others begin; those under
            way are waited for at the end of the process.
        outcomes: A list that gets what became of each run.

    Returns:
        The worst status of a run.
    """
    worst = 0
    ended = 0
    for outcome in run_all(runs, jobs):
        ended += 1
        worst = max(worst, outcome.status)
        if outcomes is not None:
            outcomes.append(outcome)
        print(f"{ended}/{len(runs)} {_line_of(outcome)}", file=to, flush=True)
        if after is not None and outcome.status == 0:
            after(outcome.wanted)

    if ended < len(runs):
        not_begun = f"{len(runs) - ended} of {len(runs)} runs not begun"
        print(f"stopped: {not_begun}; run the same command to continue", file=to)
        worst = max(worst, 128 + SIGINT)
    return worst


def numbers_of(
    runs: Sequence[Wanted],
    outcomes: Sequence[Outcome],
    status: int,
    trials: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return what became of a list as values for JSON.

    Args:
        runs: The runs, in the order of the list.
        outcomes: What became of those that have begun.
        status: The status of the command.
        trials: Every trial of a search.
    """
    # In the order of the list, and not in that of their ends.
    outcome_of = {outcome.wanted.identity: outcome for outcome in outcomes}
    rows = [_numbers(wanted, outcome_of.get(wanted.identity)) for wanted in runs]
    return {"status": status, "runs": rows, "trials": list(trials)}


def _numbers(wanted: Wanted, outcome: Outcome | None) -> dict[str, Any]:
    """Return what became of a run as values for JSON.

    Args:
        wanted: The run.
        outcome: What became of it; None if it has not begun.
    """
    numbers: dict[str, Any] = {
        "command": shlex.join(["lightfed", *wanted.words]),
        "name": wanted.name,
        "state": "not begun",
        "status": None,
        "error": None,
        "folder": None,
        "seconds": None,
        "algorithm": None,
        "seed": None,
        "metric": None,
        "value": None,
    }
    if outcome is None:
        return numbers

    numbers["status"] = outcome.status
    if outcome.seconds:
        numbers["seconds"] = outcome.seconds
    if outcome.status:
        return numbers | {"state": "failed", "error": outcome.said}

    folder = wanted.finished()
    assert folder is not None, "status 0 is that of a finished run"
    result = read(folder)
    metric = primary_metric(result)
    return numbers | {
        "state": "finished" if outcome.seconds else "was finished",
        "folder": str(folder),
        "algorithm": result.algorithm,
        "seed": result.seed,
        "metric": metric,
        "value": result.final(metric),
    }


def submit(file: Path, lines: Sequence[int], further: Sequence[str], *, jobs: int | None) -> int:
    """Submit an array with a task for each of these lines of a list.

    Args:
        file: The list.
        lines: Numbers of its lines, from 1.
        further: Words that are added to every line.
        jobs: How many tasks may run at once; None for all.

    Returns:
        The status of sbatch.

    Raises:
        UserError: There is no sbatch, or its script is not in this folder.
    """
    if not lines:
        print(f"all runs of {file} are finished")
        return 0

    program = shutil.which("sbatch")
    if program is None:
        raise UserError("--slurm", "there is no sbatch", "submit from a login node")
    if not SCRIPT.is_file():
        fix = "copy the scripts here: lightfed slurm copy"
        raise UserError("--slurm", f"there is no {SCRIPT} here", fix)

    array = ",".join(map(str, lines))
    if jobs:
        array += f"%{jobs}"
    command = [program, f"--array={array}", str(SCRIPT), str(file), *further]
    return subprocess.run(command, check=False).returncode


def _line_of(outcome: Outcome) -> str:
    """What is printed of a run that has ended, such as `digits-2: finished in 61.2 s, ...`."""
    wanted = outcome.wanted
    if outcome.status:
        return f"{wanted.name}: failed with status {outcome.status}: {outcome.said}"

    folder = wanted.finished()
    assert folder is not None, "status 0 is that of a finished run"
    result = read(folder)
    column = primary_metric(result)
    ended = "finished" if wanted.pause is None else f"paused after round {wanted.pause}"
    when = f"was {ended}"
    if outcome.seconds:
        when = f"{ended} in {seconds_text(outcome.seconds)}"
    final = goal_text(column, result.final(column))
    return f"{folder}: {result.algorithm}, seed {result.seed}, {when}, {final}"


# A single line, in this process.


def become(wanted: Wanted) -> int:
    """Run a command as the only one of this process; return its status."""
    lock = run_locks.wait(wanted)  # another command may be training it
    try:
        return _train(wanted)
    finally:
        os.close(lock)
        run_locks.clear(wanted)


def _train(wanted: Wanted) -> int:
    """Run a command whose lock this process has, unless its run is finished.

    If the run diverges, a file says so to the next command.
    """
    from lightfed.cli.command_line import run_words

    folder = wanted.finished()
    if folder is not None:
        print(f"{folder} is finished")
        return 0

    sys.argv[1:] = wanted.resumed()
    try:
        run_words(sys.argv[1:])
    except SystemExit as leaving:
        if NOT_FINITE in str(leaving.__context__):
            wanted.diverged.parent.mkdir(parents=True, exist_ok=True)
            wanted.diverged.touch()
        raise

    if wanted.finished() is None:
        found = "the command ended, but the run has not finished"
        raise UserError(wanted.name, found, "run the same command again")
    return 0


def read_lines(file: Path, further: Sequence[str], *, only: int | None) -> dict[int, list[str]]:
    """The words of each line of a list by its number, from 1, without comments.

    Args:
        file: The list.
        further: Words that are added to every line.
        only: The number of the line to read; None for all.

    Raises:
        UserError: The file cannot be read or split into words, or it has no such line.
    """
    try:
        texts = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        found = f"{file} cannot be read ({error})"
        raise UserError(
            "sweep", found, "name a file with the arguments of one run on each line"
        ) from error
    if only is not None and only > len(texts):
        raise UserError("--line", f"{only}, but {file} has {len(texts)}", "count from 1")

    lines = {}
    for number, text in enumerate(texts, 1):
        is_chosen = only in (None, number)
        is_comment = not text.strip() or text.lstrip().startswith("#")
        if not is_chosen or is_comment:
            continue
        try:
            lines[number] = [*shlex.split(text), *further]
        except ValueError as error:
            found = f"it cannot be split into words ({error})"
            raise UserError(f"{file}, line {number}", found, "close its quotes") from error
    return lines
