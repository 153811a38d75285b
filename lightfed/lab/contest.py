"""Methods on equal terms: the same data, tests and seeds, and rates tuned alike.

`lightfed compare` and `lightfed study` are such contests. What is missing is run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pandas import DataFrame

from lightfed.cli import run_locks
from lightfed.cli.known_runs import KnownRuns
from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.drawing.files import write_file
from lightfed.lab.report.comparison import common_metric
from lightfed.lab.results import text
from lightfed.lab.results.groups import Group, best_of
from lightfed.lab.results.run import Run, read
from lightfed.lab.results.verdicts import refused, unequal
from lightfed.utils.errors import UserError
from lightfed.utils.keys import terms

EDGE = " (edge of the grid)"
# The part of its training samples that a client keeps, by which a search chooses. A method's own
# `data.validation` comes before it.
VALIDATION_SHARE = 0.1
FAILED = "failed"  # a point of the search: a run ended early, or without a finite value


class Method(NamedTuple):
    """One side of a contest.

    Attributes:
        name: What readers call it.
        words: The words of its command, without a seed.
    """

    name: str
    words: tuple[str, ...]


class Grid(NamedTuple):
    """The search that every method gets alike.

    Attributes:
        values: The values to try, by key.
        seeds: The seeds of the search. They are none of the compared ones.
        validation: The part of its training samples that a client keeps, in the search and in the
            compared runs. With 0 values are chosen on test samples.
    """

    values: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    validation: float = VALIDATION_SHARE

    @property
    def points(self) -> list[tuple[str, ...]]:
        """Every combination of the values, as words of a command."""
        options = []
        for key, values in self.values.items():
            options.append([f"--{key}={value}" for value in values])

        return list(itertools.product(*options))

    def on_edge(self, place: int) -> bool:
        """Whether the point at `place` has the first or the last value of one of the keys."""
        for values, word in zip(self.values.values(), self.points[place], strict=True):
            value = word.partition("=")[2]
            if value in (values[0], values[-1]):
                return True
        return False


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


Candidates = Mapping[str, Sequence[Wanted]]
"""The run that each method would be at each point of the grid, by the method's name."""


class Commands:
    """The commands of all methods at all points of a grid, without seeds.

    Args:
        methods: The methods.
        points: The words of each point.
    """

    def __init__(self, methods: Sequence[Method], points: Sequence[tuple[str, ...]]) -> None:
        self._methods = methods
        self._points = points

        # The name of a method by the words of a command. Two methods with the same command share
        # their runs.
        self._name_of: dict[tuple[str, ...], str] = {}
        for method in methods:
            for point in points:
                self._name_of[(*method.words, *point)] = method.name
        self._known = KnownRuns(list(self._name_of))

    @classmethod
    def of(cls, methods: Sequence[Method], grid: Grid | None) -> Commands:
        """Return the commands of methods, whose clients keep samples for the search of a grid."""
        if grid is None:
            return cls(methods, [()])
        if grid.validation:
            methods = [_with_validation(method, grid.validation) for method in methods]
        return cls(methods, grid.points)

    def recalled(self) -> Candidates | None:
        """Return what the commands ask for, as an earlier reading has found; None without one."""
        recalled = self._known.recall()
        return None if recalled is None else self._candidates(recalled)

    @contextmanager
    def read_anew(self) -> Iterator[Candidates]:
        """Read the commands by the parser, and keep what was found after a block, if it ends."""
        wanted = sweep.checked([*self._name_of], [*self._name_of.values()], twins=True)
        try:
            yield self._candidates(wanted)
        finally:
            self._known.keep(wanted)

    def _candidates(self, wanted: Sequence[Wanted]) -> Candidates:
        """Return what the commands, in their order, ask for, by method."""
        wanted_of = dict(zip(self._name_of, wanted, strict=True))
        candidates = {}
        for method in self._methods:
            commands = [(*method.words, *point) for point in self._points]
            candidates[method.name] = [wanted_of[command] for command in commands]
        return candidates


class Held(NamedTuple):
    """A contest that has been held.

    Attributes:
        groups: The runs of each method, in the order of the methods.
        search: A row for each method: its mean at every point of the grid, and what was chosen.
        metric: The column of metrics.csv of the verdict.
        differ: The differences between methods that were permitted, in words.
        chosen_by: The column of the search: the metric on validation samples, if there are some.
    """

    groups: list[Group]
    search: DataFrame
    metric: str
    differ: list[str]
    chosen_by: str = ""


def hold(
    methods: Sequence[Method],
    seeds: Sequence[int],
    way: Way,
    *,
    grid: Grid | None = None,
    metric: str | None = None,
    needed: Sequence[Needed] = (),
    differ: Sequence[str] = (),
) -> Held:
    """Run what is missing of a contest and read all of it; end the process if a run failed.

    Args:
        methods: Two or more methods, each of another name.
        seeds: The seeds of the compared runs.
        way: How missing runs are run.
        grid: The search for the best values of each method; None for no search.
        metric: A column of metrics.csv; by default the first that all runs have.
        needed: Columns that runs must have. The first run that has ended without one of them ends
            the contest, before others are trained in vain.
        differ: Keys in which methods may differ, though they decide what is measured.

    Raises:
        UserError: A command cannot run, the terms are not equal, a seed of the search is compared,
            or a run does not have the metric.
        Submitted: What is missing has been submitted. Without a handler it ends the process.
    """
    _check_seeds(grid, seeds)
    commands = Commands.of(methods, grid)
    recalled = commands.recalled()
    if recalled is not None:
        # With all runs at hand, nobody has to wait for the parser.
        waiting = way._replace(trains=False)
        with suppress(Missing):
            return _enter(recalled, waiting, grid, metric, needed, differ).run(seeds, waiting)

    with commands.read_anew() as candidates:
        return _enter(candidates, way, grid, metric, needed, differ).run(seeds, way)


class Entered(NamedTuple):
    """A contest whose settings are chosen, and whose compared runs may be missing.

    Attributes:
        winners: The chosen run of each method, by the method's name, without a seed.
        search: As in `Held`.
        metric: The column of metrics.csv; None for the first that all runs have.
        differ: As in `Held`.
        chosen_by: As in `Held`.
        needed: Columns that runs must have.
    """

    winners: Mapping[str, Wanted]
    search: DataFrame
    metric: str | None
    differ: list[str]
    chosen_by: str = ""
    needed: Sequence[Needed] = ()

    def run(self, seeds: Sequence[int], way: Way) -> Held:
        """Run what is missing of these seeds and read all of it; see `hold`.

        Raises:
            Missing: A run is missing, and may not be run.
        """
        runs_of = _run_winners(self.winners, seeds, way, self.needed)
        every_run = [run for runs in runs_of.values() for run in runs]
        metric = self.metric or common_metric(every_run)
        for name, runs in runs_of.items():
            for run in runs:
                Needed("--metric", metric).check(run, name)

        groups = []
        for place, (name, runs) in enumerate(runs_of.items()):
            groups.append(Group(name, tuple(runs), name, runs[0].data, place))
        return Held(groups, self.search, metric, self.differ, self.chosen_by)


def enter(
    methods: Sequence[Method],
    seeds: Sequence[int],
    way: Way,
    *,
    grid: Grid | None = None,
    metric: str | None = None,
    needed: Sequence[Needed] = (),
    differ: Sequence[str] = (),
) -> Entered:
    """Check the methods and search their settings; the arguments and errors are those of `hold`."""
    _check_seeds(grid, seeds)
    with Commands.of(methods, grid).read_anew() as candidates:
        return _enter(candidates, way, grid, metric, needed, differ)


def _check_seeds(grid: Grid | None, seeds: Sequence[int]) -> None:
    """Refuse to compare on a seed of the search."""
    if grid is not None and set(grid.seeds) & set(seeds):
        raise UserError("--tune-seed", "a compared seed", "give another")


def _enter(
    candidates: Candidates,
    way: Way,
    grid: Grid | None,
    metric: str | None,
    needed: Sequence[Needed],
    differ: Sequence[str],
) -> Entered:
    """Enter a contest whose commands have been read; see `hold` for the arguments.

    Raises:
        Missing: A run of the search is missing, and may not be run.
    """
    first_points = {name: tried[0] for name, tried in candidates.items()}
    permitted = check_terms(first_points, differ)
    if grid is None:
        return Entered(first_points, DataFrame(), metric, permitted, needed=needed)

    runs_of_points = _run_search(candidates, grid, way, needed)
    runs_of_search = _runs_of_search(runs_of_points)
    metric = metric or common_metric(runs_of_search)
    columns = {run.chosen_by(metric) for run in runs_of_search}
    # One run without validation samples would be held against others that have them.
    chosen_by = columns.pop() if len(columns) == 1 else metric
    search, best = _best(runs_of_points, grid, chosen_by)
    winners = {name: tried[best[name]] for name, tried in candidates.items()}
    return Entered(winners, search, metric, permitted, chosen_by, needed)


def _with_validation(method: Method, share: float) -> Method:
    """Return a method whose clients keep validation samples, unless it says itself how many.

    Of an option that is given twice the last one counts, and a configuration is given later.
    """
    command, *words = method.words
    return method._replace(words=(command, f"--data.validation={share}", *words))


def check_terms(methods: Mapping[str, Wanted], differ: Sequence[str]) -> list[str]:
    """Return the permitted differences between methods, in words.

    Args:
        methods: A run of each method. All are compared with the first.
        differ: Keys in which they may differ.

    Raises:
        UserError: A difference is not permitted; the first one is named.
    """
    (base, first), *others = methods.items()
    permitted = []
    for name, wanted in others:
        differences = unequal(terms(first.values), terms(wanted.values))
        for key, of_base, of_other in refused(differences, differ):
            found = f"{of_base} for {base}, {of_other} for {name}"
            raise UserError(key, found, f"make them agree, or permit it by --differ {key}")
        for key, of_base, of_other in differences:
            permitted.append(f"{key} differs: {of_base} for {base}, {of_other} for {name}")
    return permitted


# The search.

# By the name of a method, for each point of the grid: the run of each seed, None if it failed.
RunsOfPoints = Mapping[str, Sequence[Sequence[Run | None]]]


def _run_search(
    candidates: Mapping[str, Sequence[Wanted]], grid: Grid, way: Way, needed: Sequence[Needed]
) -> RunsOfPoints:
    """Run every candidate on the seeds of the search, and mark these runs as such."""
    every = []
    for name, tried in candidates.items():
        for wanted in tried:
            every += [(name, wanted.at(seed)) for seed in grid.seeds]

    runs = _run(every, way, needed, all_of_them=False)
    for run in runs:
        if run is not None:
            mark_as_search(run)

    remaining = iter(runs)
    runs_of_points = {}
    for name, tried in candidates.items():
        runs_of_points[name] = [[next(remaining) for _ in grid.seeds] for _ in tried]
    return runs_of_points


def _runs_of_search(runs_of_points: RunsOfPoints) -> list[Run]:
    """All runs of the search that have not failed."""
    runs = []
    for points in runs_of_points.values():
        for runs_of_seeds in points:
            runs += [run for run in runs_of_seeds if run is not None]
    return runs


def _best(
    runs_of_points: RunsOfPoints, grid: Grid, metric: str
) -> tuple[DataFrame, dict[str, int]]:
    """The search as a table, and the place of the best point of each method, the first of equals.

    A point is worth its mean over the seeds of the search. One that failed on any of them, such as
    a rate that is too high, is not chosen.
    """
    heads = [", ".join(word.partition("=")[2] for word in point) for point in grid.points]
    rows = []
    best = {}
    for name, points in runs_of_points.items():
        means = {}
        for place, runs in enumerate(points):
            mean = fmean(math.nan if run is None else run.final(metric) for run in runs)
            if math.isfinite(mean):
                means[place] = mean
        if not means:
            raise UserError("--tune", f"no finite {metric} of {name}", "give other values")

        best[name] = best_of(means, metric)
        cells = dict.fromkeys(heads, FAILED)
        for place, mean in means.items():
            cells[heads[place]] = text.metric_text(metric, mean)
        chosen = heads[best[name]]
        if grid.on_edge(best[name]):
            chosen += EDGE
        rows.append({"search": name, **cells, "chosen": chosen})
    return DataFrame(rows, dtype="str"), best


def mark_as_search(run: Run) -> None:
    """Note in a run's folder that it only served to choose a setting: reports leave it out.

    A folder that cannot be written is left as it is.
    """
    if run.of_search:
        return
    text_of_file = json.dumps(run.environment | {"search": True}, indent=1) + "\n"
    with suppress(UserError):
        write_file(run.folder / "environment.json", text_of_file.encode())


# Runs.


def _run_winners(
    winners: Mapping[str, Wanted], seeds: Sequence[int], way: Way, needed: Sequence[Needed]
) -> dict[str, list[Run]]:
    """The runs of each method, in the order of the seeds."""
    # Seed by seed, so that a contest that is stopped leaves whole rows of a table.
    every = []
    for seed in seeds:
        every += [(name, wanted.at(seed)) for name, wanted in winners.items()]

    remaining = iter(_run(every, way, needed))
    runs_of: dict[str, list[Run]] = {name: [] for name in winners}
    for _ in seeds:
        for name in winners:
            run = next(remaining)
            assert run is not None, "all of these runs are needed, and have finished"
            runs_of[name].append(run)
    return runs_of


def _run(
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
        cost = f", about {way.seconds * len(missing) / 60:.1f} CPU minutes" if way.seconds else ""
        print(f"{len(missing)} of {len(unique)} runs are missing{cost}", file=sys.stderr)
        if way.slurm:
            _submit(missing, way)
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


def _submit(missing: Sequence[Wanted], way: Way) -> None:
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
