"""`lightfed sweep`: the runs of a list, a line with the arguments of each."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT
from typing import TextIO

from jsonargparse.typing import PositiveInt

from lightfed.cli import run_locks
from lightfed.cli.wanted import Wanted
from lightfed.lab.results.run import primary_metric, read
from lightfed.lab.results.text import goal_text, seconds_text
from lightfed.lab.runner import Outcome, check, run_all
from lightfed.utils.errors import NOT_FINITE, OneLineParser, UserError, require
from lightfed.utils.process import report

SCRIPT = Path("slurm/sweep.sbatch")


def add_execution(parser: argparse.ArgumentParser) -> None:
    """The options of commands that run many runs."""
    add = parser.add_argument
    add("--jobs", type=PositiveInt, metavar="N", help="runs at once (default: 1, on a cluster all)")
    add("--slurm", action="store_true", help="submit what is missing as a job array, and end")


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed sweep`."""
    parser = OneLineParser(
        "lightfed sweep",
        allow_abbrev=False,
        description="Run what is missing of a list: each line has the arguments of `lightfed`, "
        "such as `fit --config FILE --model.seed 1`. Further arguments are added to every line.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the list; # begins a comment")
    alone = "run this line alone, in this process: for a task of a job array"
    parser.add_argument("--line", type=PositiveInt, metavar="N", help=alone)
    add_execution(parser)
    asked, further = parser.parse_known_args(argv)
    lines = _lines(asked.file, further, only=asked.line)
    if asked.line is not None and not lines:
        print(f"line {asked.line} of {asked.file} is empty or a comment: nothing to train")
        return 0
    require(
        bool(lines), "sweep", f"{asked.file} has no line to run", "write one: fit --config FILE"
    )
    runs = checked(list(lines.values()), [f"{asked.file}, line {number}" for number in lines])
    if asked.line is not None:
        return _become(runs[0])
    if asked.slurm:
        todo = [n for n, wanted in zip(lines, runs, strict=True) if wanted.finished() is None]
        return submit(asked.file, todo, further, jobs=asked.jobs)
    return run(runs, jobs=asked.jobs or 1)


def checked(
    commands: Sequence[Sequence[str]], names: Sequence[str], *, twins: bool = False
) -> list[Wanted]:
    """What all commands ask for; ends the process if one cannot run, with a line for each fault.

    Two commands of one run are a fault, unless `twins` may share it.
    """
    found, faults, first = [], 0, dict[tuple[str, ...], str]()
    for name, wanted in zip(names, check(commands), strict=True):
        fault = wanted if isinstance(wanted, UserError) else None
        if isinstance(wanted, Wanted):
            twin = first.setdefault(wanted.identity, name)
            if twin is not name and not twins:
                fault = UserError("trainer.name", f"the run of {twin}", "give it another name")
            found.append(wanted)
        if fault is not None:
            report(UserError(f"{name}: {fault.key}", fault.found, fault.fix))
            faults += 1
    if faults:
        sys.exit(UserError.status)
    return found


def run(runs: Sequence[Wanted], *, jobs: int, to: TextIO | None = None) -> int:
    """Run what is missing, and print a line for each, to standard output by default.

    Returns the worst status.
    """
    worst, ended = 0, 0
    for outcome in run_all(runs, jobs):
        ended += 1
        worst = max(worst, outcome.status)
        print(f"{ended}/{len(runs)} {_line_of(outcome)}", file=to, flush=True)
    if ended < len(runs):
        left = f"{len(runs) - ended} of {len(runs)} not begun"
        print(f"stopped: {left}; the same command goes on", file=to)
        worst = max(worst, 128 + SIGINT)
    return worst


def submit(file: Path, lines: Sequence[int], further: Sequence[str], *, jobs: int | None) -> int:
    """Submit an array with a task for each of these lines; the status of sbatch."""
    if not lines:
        print(f"all runs of {file} are finished")
        return 0
    program = shutil.which("sbatch")
    require(program is not None, "--slurm", "there is no sbatch", "submit from a login node")
    fix = "copy the scripts here: lightfed slurm copy"
    require(SCRIPT.is_file(), "--slurm", f"there is no {SCRIPT} here", fix)
    array = ",".join(map(str, lines)) + (f"%{jobs}" if jobs else "")
    command = [str(program), f"--array={array}", str(SCRIPT), str(file), *further]
    return subprocess.run(command, check=False).returncode


def _line_of(outcome: Outcome) -> str:
    """`digits-2: finished in 61.2 s, 97.80 % global accuracy`."""
    wanted, folder = outcome.wanted, outcome.wanted.finished()
    if outcome.status:
        return f"{wanted.name}: failed with status {outcome.status}: {outcome.said}"
    assert folder is not None, "status 0 is that of a finished run"
    one = read(folder)
    column = primary_metric(one)
    when = f"finished in {seconds_text(outcome.seconds)}" if outcome.seconds else "was finished"
    ends = goal_text(column, one.final(column))
    return f"{folder}: {one.algorithm}, seed {one.seed}, {when}, {ends}"


def _become(wanted: Wanted) -> int:
    """Run a command as the only one of this process; a file says if it has diverged."""
    lock = run_locks.wait(wanted)  # another command may be training it
    try:
        return _train(wanted)
    finally:
        os.close(lock)
        run_locks.clear(wanted)


def _train(wanted: Wanted) -> int:
    """Run a command whose lock this process has, unless its run is finished; the status."""
    from lightfed.cli.command_line import run_words

    if (folder := wanted.finished()) is not None:
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
        found = "the command ended, and the run has not reached its limits"
        raise UserError(wanted.name, found, "run the same command again")
    return 0


def _lines(file: Path, further: Sequence[str], *, only: int | None) -> dict[int, list[str]]:
    """The words of each line by its number, from 1, with further ones; without comments."""
    try:
        texts = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        found, fix = f"{file} cannot be read ({error})", "name a list of arguments, a run on a line"
        raise UserError("sweep", found, fix) from error
    fits = only is None or only <= len(texts)
    require(fits, "--line", f"{only}, but {file} has {len(texts)}", "count from 1")
    lines = {}
    for number, text in enumerate(texts, 1):
        if only not in (None, number) or not text.strip() or text.lstrip().startswith("#"):
            continue
        try:
            lines[number] = [*shlex.split(text), *further]
        except ValueError as error:
            found = f"it cannot be split into words ({error})"
            raise UserError(f"{file}, line {number}", found, "close its quotes") from error
    return lines
