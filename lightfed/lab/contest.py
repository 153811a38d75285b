"""Methods on equal terms: the same data, tests and seeds, and rates tuned alike.

`lightfed compare` and `lightfed study` are such contests. What is missing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from pandas import DataFrame

from lightfed.cli.known_runs import KnownRuns
from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.grid import VALIDATION_SHARE, Grid, Point
from lightfed.lab.missing_runs import Missing, Needed, Submitted, Way, run_missing
from lightfed.lab.report.comparison import common_metric
from lightfed.lab.results import text
from lightfed.lab.results.groups import Group
from lightfed.lab.results.run import Run
from lightfed.lab.results.verdicts import refused, unequal
from lightfed.lab.search import (
    EDGE,
    FAILED,
    Candidates,
    ReadMore,
    Searched,
    described,
    mark_as_search,
    search,
)
from lightfed.utils.errors import UserError
from lightfed.utils.keys import terms

# What callers of a contest need is importable from here, wherever it is written.
__all__ = [
    "EDGE",
    "FAILED",
    "VALIDATION_SHARE",
    "Commands",
    "Entered",
    "Grid",
    "Held",
    "Method",
    "Missing",
    "Needed",
    "Submitted",
    "Way",
    "check_terms",
    "enter",
    "hold",
    "mark_as_search",
    "read_anew",
    "with_validation",
]


class Method(NamedTuple):
    """One side of a contest.

    Attributes:
        name: What readers call it.
        words: The words of its command, without a seed.
    """

    name: str
    words: tuple[str, ...]


class Commands:
    """The commands of all methods at all points of a grid, without seeds.

    Args:
        methods: The methods.
        points: The words of each point.
    """

    def __init__(self, methods: Sequence[Method], points: Sequence[Point]) -> None:
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
            methods = [with_validation(method, grid.validation) for method in methods]
        return cls(methods, grid.points)

    def at(self, points: Sequence[Point]) -> Commands:
        """Return the commands of the same methods at other points."""
        return Commands(self._methods, points)

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

    @contextmanager
    def tried(self) -> Iterator[Candidates]:
        """As `read_anew`, for commands that need not be possible.

        Raises:
            UserError: One of them cannot run; the first one is named.
        """
        wanted = []
        for result in sweep.check([*self._name_of]):
            if isinstance(result, UserError):
                raise result
            wanted.append(result)
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
        search: The search as a table of text; empty without one.
        metric: The column of metrics.csv of the verdict.
        differ: The differences between methods that were permitted, in words.
        chosen_by: The column of the search: the metric on validation samples, if there are some.
        searched: The whole search; None without one.
    """

    groups: list[Group]
    search: DataFrame
    metric: str
    differ: list[str]
    chosen_by: str = ""
    searched: Searched | None = None

    @property
    def trials(self) -> list[dict[str, Any]]:
        """Every trial of the search, of every method, for a program; none without a search."""
        return [] if self.searched is None else [one.numbers for one in self.searched.trials]

    def search_notes(self, grid: Grid | None) -> list[str]:
        """Return how settings were searched, in sentences; none without a search.

        Args:
            grid: The search.
        """
        if grid is None or self.searched is None:
            return []
        shares = [group.runs[0].settings.get("data.validation", "") for group in self.groups]
        return described(grid, self.searched, shares)


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

        def recall(points: Sequence[Point]) -> Candidates:
            more = commands.at(points).recalled()
            if more is None:
                raise Missing
            return more

        with suppress(Missing):
            entered = _enter(recalled, waiting, grid, metric, needed, differ, recall)
            return entered.run(seeds, waiting)

    with read_anew(commands) as (candidates, read_more):
        entered = _enter(candidates, way, grid, metric, needed, differ, read_more)
        return entered.run(seeds, way)


@contextmanager
def read_anew(commands: Commands) -> Iterator[tuple[Candidates, ReadMore]]:
    """Read commands by the parser, and further points of the same methods when they are needed."""
    with ExitStack() as stack:
        candidates = stack.enter_context(commands.read_anew())

        def read_more(points: Sequence[Point]) -> Candidates:
            return stack.enter_context(commands.at(points).tried())

        yield candidates, read_more


class Entered(NamedTuple):
    """A contest whose settings are chosen, and whose compared runs may be missing.

    Attributes:
        winners: The chosen run of each method, by the method's name, without a seed.
        search: As in `Held`.
        metric: The column of metrics.csv; None for the first that all runs have.
        differ: As in `Held`.
        chosen_by: As in `Held`.
        needed: Columns that runs must have.
        searched: As in `Held`.
    """

    winners: Mapping[str, Wanted]
    search: DataFrame
    metric: str | None
    differ: list[str]
    chosen_by: str = ""
    needed: Sequence[Needed] = ()
    searched: Searched | None = None

    def run(self, seeds: Sequence[int], way: Way) -> Held:
        """Run what is missing of these seeds and read all of it; see `hold`.

        Raises:
            UserError: A method failed in some of them; it says in which.
            Missing: A run is missing, and may not be run.
        """
        try:
            runs_of = _run_winners(self.winners, seeds, way, self.needed)
        except Submitted:
            raise
        except SystemExit as failed:
            was_stopped = isinstance(failed.code, int) and failed.code > 128
            unfinished = self._unfinished(seeds)
            if was_stopped or not unfinished:
                raise
            fix = "change what fails; finished runs are kept"
            refused = UserError("runs", f"failed: {unfinished}", fix)
            if isinstance(failed.code, int):
                refused.status = failed.code
            raise refused from failed
        every_run = [run for runs in runs_of.values() for run in runs]
        metric = self.metric or common_metric(every_run)
        for name, runs in runs_of.items():
            for run in runs:
                Needed("--metric", metric).check(run, name)

        groups = []
        for place, (name, runs) in enumerate(runs_of.items()):
            groups.append(Group(name, tuple(runs), name, runs[0].data, place))
        return Held(
            groups=groups,
            search=self.search,
            metric=metric,
            differ=self.differ,
            chosen_by=self.chosen_by,
            searched=self.searched,
        )

    def _unfinished(self, seeds: Sequence[int]) -> str:
        """Return which seeds of which methods have no finished run; empty if all have."""
        parts = []
        for name, wanted in self.winners.items():
            missing = [seed for seed in seeds if wanted.at(seed).finished() is None]
            if missing:
                parts.append(f"{name} in {text.named_seeds(missing)}")
        return ", ".join(parts)


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
    with read_anew(Commands.of(methods, grid)) as (candidates, read_more):
        return _enter(candidates, way, grid, metric, needed, differ, read_more)


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
    read_more: ReadMore,
) -> Entered:
    """Enter a contest whose commands have been read; see `hold` and `search` for the arguments.

    Raises:
        Missing: A run of the search is missing, and may not be run.
    """
    first_points = {name: tried[0] for name, tried in candidates.items()}
    permitted = check_terms(first_points, differ)
    if grid is None:
        return Entered(first_points, DataFrame(), metric, permitted, needed=needed)

    searched = search(candidates, grid, way, metric=metric, needed=needed, read_more=read_more)
    return Entered(
        winners=searched.winners,
        search=searched.table,
        metric=searched.metric,
        differ=permitted,
        chosen_by=searched.chosen_by,
        needed=needed,
        searched=searched,
    )


def with_validation(method: Method, share: float) -> Method:
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


# Runs.


def _run_winners(
    winners: Mapping[str, Wanted], seeds: Sequence[int], way: Way, needed: Sequence[Needed]
) -> dict[str, list[Run]]:
    """The runs of each method, in the order of the seeds."""
    # Seed by seed, so that a contest that is stopped leaves whole rows of a table.
    every = []
    for seed in seeds:
        every += [(name, wanted.at(seed)) for name, wanted in winners.items()]

    remaining = iter(run_missing(every, way, needed))
    runs_of: dict[str, list[Run]] = {name: [] for name in winners}
    for _ in seeds:
        for name in winners:
            run = next(remaining)
            assert run is not None, "all of these runs are needed, and have finished"
            runs_of[name].append(run)
    return runs_of
