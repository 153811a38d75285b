"""Methods on equal terms: the same data, tests and seeds, rates tuned alike; runs what is missing.

`lightfed compare` and `lightfed study` are such contests.
"""

import hashlib
import itertools
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pandas import DataFrame

from lightfed.cli import run_locks
from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.drawing.files import write_file
from lightfed.lab.report.comparison import common_metric
from lightfed.lab.results import text
from lightfed.lab.results.groups import Group, best_of
from lightfed.lab.results.run import Run, read
from lightfed.lab.results.verdicts import refused, unequal
from lightfed.utils.errors import UserError, require
from lightfed.utils.keys import terms

EDGE = " (edge of the grid)"
FAILED = "failed"  # a point of the search: a run ended early, or without a finite value


class Method(NamedTuple):
    """One side of a contest.

    Attributes:
        name: for readers.
        words: of its command, without a seed.
    """

    name: str
    words: tuple[str, ...]


class Grid(NamedTuple):
    """The search that all methods get alike: values by key, on seeds that are not compared."""

    values: Mapping[str, Sequence[str]]
    seeds: Sequence[int]

    @property
    def points(self) -> list[tuple[str, ...]]:
        """All combinations, as words of a command."""
        options = []
        for key, values in self.values.items():
            options.append([f"--{key}={value}" for value in values])

        return list(itertools.product(*options))

    def on_edge(self, place: int) -> bool:
        """Whether a point has the first or the last value of one of the keys."""
        ends = ([v in (own[0], own[-1]) for v in own] for own in self.values.values())
        return any(list(itertools.product(*ends))[place])


class Way(NamedTuple):
    """How missing runs are run: at once, or submitted, by which the contest ends for now.

    Attributes:
        jobs: at once.
        slurm: whether to submit them.
        seconds: CPU time of a run, if known.
    """

    jobs: int | None
    slurm: bool
    seconds: float | None = None


class Submitted(SystemExit):
    """Missing runs wait in a queue: the contest can be held once they have ended."""


class Held(NamedTuple):
    """A contest that has been held.

    Attributes:
        groups: the runs of each method, in order.
        search: a row for each method: its mean at every point of the grid, and what was chosen.
        metric: of the search and the verdict.
        differ: permitted differences, in words.
    """

    groups: list[Group]
    search: DataFrame
    metric: str
    differ: list[str]


def hold(
    methods: Sequence[Method],
    seeds: Sequence[int],
    way: Way,
    *,
    grid: Grid | None = None,
    metric: str | None = None,
    differ: Sequence[str] = (),
) -> Held:
    """Run what is missing; ends the process if runs failed.

    Args:
        methods: two or more.
        seeds: of the compared runs.
        way: how to run.
        grid: of the search.
        metric: column of metrics.csv; by default the first that all runs have.
        differ: keys in which the methods may differ, though it decides what is measured.

    Raises:
        UserError: a command cannot run, or the terms are not equal.
        Submitted: what is missing has been submitted; without a handler it ends the process.
    """
    names, points = [method.name for method in methods], [()] if grid is None else grid.points
    outside = grid is None or not {*grid.seeds} & {*seeds}
    require(outside, "--tune-seed", "a compared seed", "give another")
    tried = [Method(m.name, (*m.words, *point)) for m in methods for point in points]
    chosen = _checked([m.words for m in tried], [m.name for m in tried])
    permitted = check_terms(dict(zip(names, chosen[:: len(points)], strict=True)), differ)
    search = DataFrame()
    if grid is not None:
        every = [wanted.at(seed) for wanted in chosen for seed in grid.seeds]
        found = _run(every, way, all_of_them=False)
        for run in found:
            if run is not None:
                mark_as_search(run)
        metric = metric or common_metric([run for run in found if run is not None])
        search, best = _best(names, grid, found, metric)
        chosen = [chosen[len(points) * i + at] for i, at in enumerate(best)]

    # Seed by seed, so that a contest that is stopped leaves whole rows of a table.
    every = [wanted.at(seed) for seed in seeds for wanted in chosen]
    runs = [run for run in _run(every, way) if run is not None]
    runs_of: dict[str, list[Run]] = {name: [] for name in names}
    for name, run in zip(names * len(seeds), runs, strict=True):
        runs_of[name].append(run)
    groups = [
        Group(name, tuple(members), name, members[0].data, place)
        for place, (name, members) in enumerate(runs_of.items())
    ]
    metric = metric or common_metric(runs)
    known = all(run.has(metric) for run in runs)
    require(known, "--metric", f"{metric}, which some runs do not have", "see metrics.csv")
    return Held(groups, search, metric, permitted)


def check_terms(methods: Mapping[str, Wanted], differ: Sequence[str]) -> list[str]:
    """Permitted differences in words; a UserError names the first that is not permitted."""
    (base, first), *others = methods.items()
    permitted = []
    for name, wanted in others:
        differences = unequal(terms(first.values), terms(wanted.values))
        for key, mine, other in refused(differences, differ):
            found = f"{mine} for {base}, {other} for {name}"
            raise UserError(key, found, f"make them agree, or permit it by --differ {key}")
        for key, mine, other in differences:
            permitted.append(f"{key} differs: {mine} for {base}, {other} for {name}")
    return permitted


def _best(
    names: Sequence[str],
    grid: Grid,
    runs: Sequence[Run | None],
    metric: str,
) -> tuple[DataFrame, list[int]]:
    """The search as a table, and which point each method gets: the first of equal ones.

    A point is worth its mean over the seeds of the search. One that failed on any of them, such as
    a rate that is too high, is not chosen; that run is None.
    """
    rows, best, points, of_each = [], [], grid.points, len(grid.seeds)
    heads = [", ".join(word.partition("=")[2] for word in point) for point in points]
    finals = [math.nan if run is None else run.final(metric) for run in runs]
    means = [fmean(finals[i : i + of_each]) for i in range(0, len(finals), of_each)]
    for i, name in enumerate(names):
        own = means[i * len(points) : (i + 1) * len(points)]
        known = {at: mean for at, mean in enumerate(own) if math.isfinite(mean)}
        require(bool(known), "--tune", f"no finite {metric} of {name}", "give other values")
        at = best_of(known, metric)
        shown = {heads[at]: text.metric_text(metric, mean) for at, mean in known.items()}
        cells = dict.fromkeys(heads, FAILED) | shown
        edge = EDGE * grid.on_edge(at)
        rows.append({"search": name, **cells, "chosen": heads[at] + edge})
        best.append(at)
    return DataFrame(rows, dtype="str"), best


def _checked(commands: Sequence[Sequence[str]], names: Sequence[str]) -> list[Wanted]:
    """Like `sweep.checked`; equal methods may share runs."""
    unique = {tuple(words): name for words, name in zip(commands, names, strict=True)}
    found = dict(zip(unique, sweep.checked([*unique], [*unique.values()], twins=True), strict=True))
    return [found[tuple(words)] for words in commands]


def _run(runs: Sequence[Wanted], way: Way, *, all_of_them: bool = True) -> list[Run | None]:
    """Run what is missing and read all; ends the process if a run fails, or after a signal.

    Where not all of them are needed, a run that fails is None, and is not tried again if it had
    diverged.
    """
    unique = list({wanted.identity: wanted for wanted in runs}.values())
    missing = [
        wanted
        for wanted in unique
        if wanted.finished() is None and (all_of_them or not wanted.diverged.exists())
    ]
    if missing:
        cost = f", about {way.seconds * len(missing) / 60:.1f} CPU minutes" if way.seconds else ""
        print(f"{len(missing)} of {len(unique)} runs are missing{cost}", file=sys.stderr)
    if missing and way.slurm:
        status = _submit(missing, way)
        if status:
            raise SystemExit(status)
        raise Submitted(0)
    status = sweep.run(missing, jobs=way.jobs or 1, to=sys.stderr) if missing else 0
    if status and (all_of_them or status > 128):
        raise SystemExit(status)
    for wanted in unique:
        # One of a training that has outlived another command, and was not missing any more.
        run_locks.clear(wanted)
    found = [read(f) if (f := wanted.finished()) is not None else None for wanted in runs]
    whole = None not in found or not all_of_them
    require(whole, "runs", "one has not reached its limits", "run the command again")
    return found


def mark_as_search(run: Run) -> None:
    """Note in a run's folder that it only served to choose a setting: reports leave it out.

    A folder that cannot be written is left as it is.
    """
    if run.of_search:
        return
    text_of_file = json.dumps(run.environment | {"search": True}, indent=1) + "\n"
    with suppress(UserError):
        write_file(run.folder / "environment.json", text_of_file.encode())


def _submit(missing: Sequence[Wanted], way: Way) -> int:
    """Submit an array of the missing runs; says which command goes on."""
    lines = [shlex.join(wanted.words) for wanted in missing]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    file = missing[0].root / f"contest-{digest}.sweep"
    file.parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("\n".join([*lines, ""]))
    status = sweep.submit(file, range(1, len(lines) + 1), (), jobs=way.jobs)
    if not status:
        print(f"when the array has ended: {shlex.join(['lightfed', *sys.argv[1:]])}")
    return status
