"""`lightfed sweep FILE --tune KEY=...`: every line of a list gets the best values of a search.

All lines try the same values, on the same seeds. Lines that differ only in the seed share a search.
Then each line is run with the values that were best for it.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.contest import Commands, Method, read_anew, with_validation
from lightfed.lab.drawing.summary import new_console, print_line, print_table
from lightfed.lab.grid import Grid
from lightfed.lab.missing_runs import Needed, Way, submit
from lightfed.lab.runner import Outcome
from lightfed.lab.search import Searched, described, search
from lightfed.utils.errors import UserError
from lightfed.utils.json_output import print_json
from lightfed.utils.keys import digest

_SEED = "model.seed"


def run_tuned(asked: argparse.Namespace, lines: Mapping[int, Sequence[str]], grid: Grid) -> int:
    """Search the values of each line, run what is missing of the list, and return the status.

    Args:
        asked: The arguments of the command.
        lines: The words of each line by its number.
        grid: The search.

    Raises:
        UserError: A line has a seed of the search, or no value is of use for a line.
        Submitted: What is missing has been submitted.
    """
    names = [f"{asked.file}, line {number}" for number in lines]
    methods = [
        Method(name, tuple(words)) for name, words in zip(names, lines.values(), strict=True)
    ]
    searched_by = _shared_searches(methods, grid)
    representatives = [method for method in methods if searched_by[method.name] == method.name]

    way = Way(asked.jobs, asked.slurm)
    needed = [] if asked.metric is None else [Needed("--metric", asked.metric)]
    with read_anew(Commands.of(representatives, grid)) as (candidates, read_more):
        found = search(
            candidates, grid, way, metric=asked.metric, needed=needed, read_more=read_more
        )
        share = str(candidates[representatives[0].name][0].values["data.validation"])

    tuned = [_tuned(method, found, searched_by[method.name], grid) for method in methods]
    runs = sweep.checked([method.words for method in tuned], names)

    if not asked.json:
        console = new_console()
        for line in described(grid, found, [share]):
            print_line(console, line)
        print_table(console, found.table)
    if asked.slurm:
        missing = [wanted for wanted in runs if wanted.finished() is None]
        if not missing:
            print(f"all runs of {asked.file} are finished")
            return 0
        submit(missing, way)
    if not asked.json:
        return sweep.run(runs, jobs=asked.jobs or 1)

    outcomes: list[Outcome] = []
    status = sweep.run(runs, jobs=asked.jobs or 1, to=sys.stderr, outcomes=outcomes)
    trials = [trial.numbers for trial in found.trials]
    print_json(sweep.numbers_of(runs, outcomes, status, trials))
    return status


def _shared_searches(methods: Sequence[Method], grid: Grid) -> dict[str, str]:
    """Return for each line the name of the first one that differs from it only in the seed.

    Raises:
        UserError: A line has a seed of the search.
    """
    wanted_of = sweep.checked(
        [method.words for method in methods], [method.name for method in methods]
    )
    searched_by: dict[str, str] = {}
    first_of: dict[str, str] = {}
    for method, wanted in zip(methods, wanted_of, strict=True):
        seed = wanted.values[_SEED]
        if seed in grid.seeds:
            raise UserError("--tune-seed", f"{seed}, the seed of {method.name}", "give another")
        searched_by[method.name] = first_of.setdefault(_without_seed(wanted), method.name)
    return searched_by


def _without_seed(wanted: Wanted) -> str:
    """Return a digest of what results of a run depend on besides its seed."""
    options = {key: value for key, value in wanted.options.items() if key != _SEED}
    return digest({**options, **wanted.limits})


def _tuned(method: Method, found: Searched, searched_by: str, grid: Grid) -> Method:
    """Return a line with the values that a search has chosen, as the search has run them.

    Args:
        method: The line.
        found: The search.
        searched_by: The line whose search it shares.
        grid: What was searched.
    """
    (chosen,) = [trial for trial in found.trials if trial.chosen and trial.method == searched_by]
    words = [f"--{key}={value}" for key, value in chosen.values.items()]
    if grid.validation:
        method = with_validation(method, grid.validation)
    return method._replace(words=(*method.words, *words))
