"""`lightfed sweep`: the runs of a list, a line with the arguments of each."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightfed.cli.known_runs import KnownRuns
from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.grid import Grid
from lightfed.lab.runner import Outcome
from lightfed.lab.search_options import add_search, grid_of_options
from lightfed.lab.sweep import PositiveInt, add_execution, check_json
from lightfed.utils.errors import OneLineParser, UserError
from lightfed.utils.json_output import print_json


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed sweep`."""
    asked, further = _parser().parse_known_args(argv)
    check_json(asked)
    grid = _grid_of(asked)
    if asked.json and asked.line is not None:
        raise UserError("--json", "given beside --line", "leave one of them out")
    lines = sweep.read_lines(asked.file, further, only=asked.line)
    if not lines and asked.line is not None:
        print(f"line {asked.line} of {asked.file} is empty or a comment: nothing to train")
        return 0
    if not lines:
        found = f"{asked.file} has no line to run"
        raise UserError("sweep", found, "write one: fit --config FILE")

    if grid is not None:
        from lightfed.lab.tuned_sweep import run_tuned  # it needs pandas, which other sweeps do not

        return run_tuned(asked, lines, grid)

    names = [f"{asked.file}, line {number}" for number in lines]
    known = KnownRuns(list(lines.values()))
    runs = _finished(known, names)
    if runs is None:
        runs = sweep.checked(list(lines.values()), names)
    try:
        return _run_lines(asked, lines, further, runs)
    finally:
        known.keep(runs)


def _grid_of(asked: argparse.Namespace) -> Grid | None:
    """Return the search that the options ask for; None for no search.

    Raises:
        UserError: The options do not fit each other.
    """
    grid = grid_of_options(asked)
    if grid is None and asked.metric is not None:
        raise UserError("--metric", "given without --tune", "leave it out: nothing is chosen by it")
    if grid is not None and asked.line is not None:
        fix = "leave --line out: a line alone has no search"
        raise UserError("--tune", "given beside --line", fix)
    return grid


def _finished(known: KnownRuns, names: Sequence[str]) -> list[Wanted] | None:
    """Return the runs of a list if they are known and finished, so that nothing is to train."""
    runs = known.recall()
    if runs is None or any(wanted.finished() is None for wanted in runs):
        return None
    return sweep.each_once(runs, names)


def _run_lines(
    asked: argparse.Namespace,
    lines: Mapping[int, Sequence[str]],
    further: Sequence[str],
    runs: Sequence[Wanted],
) -> int:
    """Run what is missing of a list here, or submit it; return the status.

    Args:
        asked: The arguments of the command.
        lines: The words of each line by its number.
        further: Words that were added to every line.
        runs: The run of each line.
    """
    if asked.line is not None:
        return sweep.become(runs[0])
    if asked.slurm:
        missing = []
        for number, wanted in zip(lines, runs, strict=True):
            if wanted.finished() is None:
                missing.append(number)
        return sweep.submit(asked.file, missing, further, jobs=asked.jobs)
    if asked.json:
        return _run_for_program(runs, jobs=asked.jobs or 1)
    return sweep.run(runs, jobs=asked.jobs or 1)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "lightfed sweep",
        allow_abbrev=False,
        description="Run every line of a file that has not been run yet. A line has the arguments "
        "of `lightfed`, such as `fit --config FILE --model.seed 1`. Further arguments are added to "
        "every line.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the file; # begins a comment")
    alone = "run only this line, in this process, as a task of a job array does"
    parser.add_argument("--line", type=PositiveInt, metavar="N", help=alone)
    add_execution(parser)

    searching = parser.add_argument_group("to search settings for every line")
    add_search(searching.add_argument)
    chosen_by = "choose by this metric (default: the first that all runs have)"
    searching.add_argument("--metric", metavar="COLUMN", help=chosen_by)
    what = "print the outcome of each run as JSON; progress goes to standard error"
    parser.add_argument("--json", action="store_true", help=what)
    return parser


def _run_for_program(runs: Sequence[Wanted], *, jobs: int) -> int:
    """As `run`, with lines on standard error, and an object for a program at the end."""
    outcomes: list[Outcome] = []
    status = sweep.run(runs, jobs=jobs, to=sys.stderr, outcomes=outcomes)

    print_json(sweep.numbers_of(runs, outcomes, status))
    return status
