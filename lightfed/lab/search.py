"""The search for settings: every method tries the same values, and gets the best of them.

The values are lists, of which all combinations are tried, or ranges, from which trials are drawn
(`ranges`). Trials that are hopeless after a part of their rounds are stopped. Which part that is,
and how many go on, is fixed before the first run and the same for every method: it is a successive
halving (K. Jamieson and A. Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", AISTATS 2016). A run that is stopped is kept, and can go on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pandas import DataFrame

from lightfed.cli.wanted import Wanted
from lightfed.lab.drawing.files import write_file
from lightfed.lab.grid import Grid, Point, values_of
from lightfed.lab.missing_runs import Needed, Way, run_missing
from lightfed.lab.ranges import Range, Side
from lightfed.lab.report.comparison import common_metric
from lightfed.lab.results import text
from lightfed.lab.results.groups import best_of
from lightfed.lab.results.run import Run, is_metric
from lightfed.utils.errors import UserError

EDGE = " (edge of the grid)"
FAILED = "failed"  # a point of the search: a run ended early, or without a finite value

# The parts of its rounds after which a trial may be stopped. Each time half of the trials go on.
HALVINGS = (0.25, 0.5)

Candidates = Mapping[str, Sequence[Wanted]]
"""The run that each method would be at each point of a search, by the method's name."""

State = Literal["finished", "stopped", "failed"]


class Trial(NamedTuple):
    """What became of a method at a point of the search.

    Attributes:
        number: The position of the point, from 1. It is the same for every method.
        method: The method.
        values: The values of the point, by key.
        state: Whether all of its runs finished, were stopped for being hopeless, or one failed.
        value: The mean over the seeds of the search, at the end or where it was stopped; NaN if it
            failed.
        rounds: The rounds after which it was stopped; None if it was not.
        extended: Whether the point lies beyond a range, which was extended.
        chosen: Whether the method got these values.
    """

    number: int
    method: str
    values: Mapping[str, str]
    state: State
    value: float
    rounds: int | None = None
    extended: bool = False
    chosen: bool = False

    @property
    def numbers(self) -> dict[str, Any]:
        """The trial for a program."""
        return {
            "trial": self.number,
            "method": self.method,
            "values": dict(self.values),
            "state": self.state,
            "value": self.value if math.isfinite(self.value) else None,
            "rounds": self.rounds,
            "extended": self.extended,
            "chosen": self.chosen,
        }


class Searched(NamedTuple):
    """A search that has ended.

    Attributes:
        winners: The chosen run of each method, by the method's name, without a seed.
        table: The search as a table of text.
        trials: Every trial of every method.
        metric: The column of metrics.csv that the search is about.
        chosen_by: The column by which it chose: the metric on validation samples, if there are
            some.
        notes: How it went, in sentences.
    """

    winners: dict[str, Wanted]
    table: DataFrame
    trials: list[Trial]
    metric: str
    chosen_by: str
    notes: list[str]


ReadMore = Callable[[Sequence[Point]], Candidates]
"""Reads the commands of all methods at further points; a UserError says why one cannot run."""


def search(
    candidates: Candidates,
    grid: Grid,
    way: Way,
    *,
    metric: str | None,
    needed: Sequence[Needed],
    read_more: ReadMore,
) -> Searched:
    """Run what is missing of a search, and choose the values of each method.

    Args:
        candidates: The run of each method at each point.
        grid: The search.
        way: How missing runs are run.
        metric: The column to choose by; by default the first that all runs have.
        needed: Columns that runs must have.
        read_more: Reads the commands at the points of an extended range.

    Raises:
        UserError: A method has no finite value at any point.
        Missing: A run is missing, and may not be run.
        Submitted: What is missing has been submitted.
    """
    rounds = _Rounds(grid, way, metric, needed)
    trials = rounds.hold(candidates, grid.points)
    wanted_of = _wanted_by_trial(candidates, 0)
    best = _best(trials, rounds.column)

    notes = _notes_of_halving(candidates, grid)
    for key, side, method in _ends_that_win(grid, trials, best, rounds.column):
        points = grid.points_beyond(key, side)
        place = f"{side} {_end_of(grid.ranges[key], side)}"
        value = best[method].values[key]
        why = f"{key} = {value} was the {_EXTREME[side]} value that {method} tried, and its best"
        if not points:
            notes.append(f"{why}: {key} was not extended {place}, where it has no values")
            continue
        try:
            more = read_more(points)
        except UserError as refused:
            notes.append(f"{why}: {key} was not extended {place}: {refused.found}")
            continue

        before = len(trials) // len(candidates)
        trials += rounds.hold(more, points, before=before, extended=True)
        wanted_of |= _wanted_by_trial(more, before)
        beyond = grid.ranges[key].beyond(side)
        assert beyond is not None, "there are points in it"
        notes.append(
            f"{why}: the range was extended once {place}, to {_end_of(beyond, side)}, by "
            f"{text.counted(len(points), 'trial')} more for each method"
        )

    best = _best(trials, rounds.column)
    chosen = [trial._replace(chosen=trial == best[trial.method]) for trial in trials]
    winners = {name: wanted_of[name, trial.number] for name, trial in best.items()}
    return Searched(
        winners=winners,
        table=_table(chosen, grid, rounds.column),
        trials=chosen,
        metric=rounds.metric,
        chosen_by=rounds.column,
        notes=notes,
    )


def _wanted_by_trial(candidates: Candidates, before: int) -> dict[tuple[str, int], Wanted]:
    """Return the runs of a batch of trials by their method and number, after so many others."""
    wanted_of = {}
    for name, tried in candidates.items():
        for place, wanted in enumerate(tried, before + 1):
            wanted_of[name, place] = wanted
    return wanted_of


# The trials.


class _Rounds:
    """Batches of trials, of which hopeless ones are stopped.

    Attributes:
        metric: The column that the search is about, from the first runs on.
        column: The column by which it chooses.
    """

    metric: str
    column: str

    def __init__(self, grid: Grid, way: Way, metric: str | None, needed: Sequence[Needed]) -> None:
        self._grid = grid
        self._way = way
        self._given_metric = metric
        self._needed = needed
        self._is_decided = False

    def hold(
        self,
        candidates: Candidates,
        points: Sequence[Point],
        *,
        before: int = 0,
        extended: bool = False,
    ) -> list[Trial]:
        """Run a batch of trials, and return what became of each, point by point.

        Args:
            candidates: The run of each method at each point.
            points: The points.
            before: How many trials there were before.
            extended: Whether the points lie beyond a range.
        """
        left = {name: list(range(len(tried))) for name, tried in candidates.items()}
        trial_of: dict[tuple[str, int], Trial] = {}

        def note(name: str, place: int, state: State, value: float, rounds: int | None) -> None:
            number = before + place + 1
            values = values_of(points[place])
            trial_of[name, place] = Trial(number, name, values, state, value, rounds, extended)

        for halving, part in enumerate(HALVINGS, 1):
            if not self._grid.stops_early:
                break
            pauses = {}
            for name, tried in candidates.items():
                pause = pause_of(tried[0], part)
                is_first = halving == 1 or pause != pause_of(tried[0], HALVINGS[halving - 2])
                going_on = going_on_of(len(tried), halving)
                if pause is not None and is_first and len(left[name]) > going_on:
                    pauses[name] = pause

            means = self._run(candidates, {name: left[name] for name in pauses}, pauses)
            for name, mean_of in means.items():
                finite = [place for place in mean_of if math.isfinite(mean_of[place])]
                ranked = sorted(finite, key=lambda place: self._cost(mean_of[place]))
                kept = ranked[: going_on_of(len(candidates[name]), halving)]
                for place, mean in mean_of.items():
                    if place not in finite:
                        note(name, place, "failed", math.nan, None)
                    elif place not in kept:
                        note(name, place, "stopped", mean, pauses[name])
                left[name] = sorted(kept)

        for name, mean_of in self._run(candidates, left, {}).items():
            for place, mean in mean_of.items():
                state: State = "finished" if math.isfinite(mean) else "failed"
                note(name, place, state, mean if math.isfinite(mean) else math.nan, None)

        places = range(len(points))
        return [trial_of[name, place] for place in places for name in candidates]

    def _cost(self, mean: float) -> float:
        """Return a number that is lower for a better mean."""
        return -text.direction(self.column) * mean

    def _run(
        self,
        candidates: Candidates,
        places_of: Mapping[str, Sequence[int]],
        pauses: Mapping[str, int],
    ) -> dict[str, dict[int, float]]:
        """Run trials up to a round or to their end, and mark the runs as those of a search.

        Args:
            candidates: The run of each method at each point.
            places_of: The points that are run, by method.
            pauses: The rounds after which they pause; to the end for a method that is not there.

        Returns:
            For each method, by point, the mean over the seeds; not finite if one of them failed.
        """
        every = []
        for name, places in places_of.items():
            for place in places:
                wanted = candidates[name][place]
                if name in pauses:
                    wanted = wanted.up_to(pauses[name])
                every += [(name, wanted.at(seed)) for seed in self._grid.seeds]
        if not every:
            return {name: {} for name in places_of}

        needed = self._needed
        if pauses:
            # A column of another question may be measured at the end alone.
            needed = [column for column in needed if column.column == self._given_metric]
        runs = run_missing(every, self._way, needed, all_of_them=False)
        finished = [run for run in runs if run is not None]
        for run in finished:
            mark_as_search(run)
        self._decide(finished)

        remaining: Iterator[Run | None] = iter(runs)
        means: dict[str, dict[int, float]] = {}
        for name, places in places_of.items():
            means[name] = {}
            for place in places:
                values = []
                for _ in self._grid.seeds:
                    values.append(self._value(next(remaining), pauses.get(name)))
                means[name][place] = fmean(values)
        return means

    def _decide(self, runs: Sequence[Run]) -> None:
        """Decide by which column to choose, from the first runs; it is the same for all others."""
        if self._is_decided:
            return
        self._is_decided = True
        self.metric = self._given_metric or common_metric(runs)
        columns = {run.chosen_by(self.metric) for run in runs}
        # One run without validation samples would be held against others that have them.
        self.column = columns.pop() if len(columns) == 1 else self.metric

    def _value(self, run: Run | None, rounds: int | None) -> float:
        """Return the value of a run, after so many rounds or at its end; not finite if it failed.

        A run of another search may have gone on from there.
        """
        if run is None:
            return math.nan
        return run.final(self.column) if rounds is None else run.after(self.column, rounds)


def going_on_of(trials: int, halving: int) -> int:
    """Return how many of a method's trials go on after the first, second, ... halving."""
    return math.ceil(trials / 2**halving)


def pause_of(wanted: Wanted, part: float) -> int | None:
    """Return the round after a part of a run in which it is evaluated; None if there is none.

    A run whose length is limited by its steps or by the time has no such round.
    """
    rounds = wanted.limits.get("max_epochs")
    has_other_limits = wanted.limits.get("max_steps", -1) != -1 or wanted.limits.get("max_time")
    if rounds is None or rounds <= 0 or has_other_limits:
        return None
    every = wanted.values.get("trainer.check_val_every_n_epoch") or 1
    pause = math.ceil(rounds * part / every) * every
    return pause if pause < rounds else None


def mark_as_search(run: Run) -> None:
    """Note in a run's folder that it only served to choose a setting: reports leave it out.

    A folder that cannot be written is left as it is.
    """
    if run.of_search:
        return
    text_of_file = json.dumps(run.environment | {"search": True}, indent=1) + "\n"
    with suppress(UserError):
        write_file(run.folder / "environment.json", text_of_file.encode())


# The choice.


def _best(trials: Sequence[Trial], column: str) -> dict[str, Trial]:
    """Return the best trial of each method among those that have finished, the first of equals.

    One that failed on any seed, such as a rate that is too high, is not chosen.
    """
    best = {}
    for name in dict.fromkeys(trial.method for trial in trials):
        value_of = {}
        for place, trial in enumerate(trials):
            if trial.method == name and trial.state == "finished":
                value_of[place] = trial.value
        if not value_of:
            raise UserError("--tune", f"no finite {column} of {name}", "give other values")
        best[name] = trials[best_of(value_of, column)]
    return best


# The end of a range on each side, in words.
_EXTREME: Mapping[Side, str] = {"below": "smallest", "above": "largest"}


def _end_of(axis: Range, side: Side) -> str:
    return f"{axis.low if side == 'below' else axis.high:.3g}"


def _ends_that_win(
    grid: Grid, trials: Sequence[Trial], best: Mapping[str, Trial], column: str
) -> list[tuple[str, Side, str]]:
    """Return the keys and sides beyond which the best value may lie, and a method that says so.

    The best value of a method is then the smallest or the largest of all that were drawn, and no
    other value has been as good. Another method may have its best elsewhere: all of them get the
    further trials.
    """
    ends: dict[tuple[str, Side], str] = {}
    for key in grid.ranges:
        tried = {float(trial.values[key]) for trial in trials}
        if len(tried) < 2:
            continue
        for name, trial in best.items():
            value = float(trial.values[key])
            if _has_an_equal(trial, trials, key, column):
                continue
            if value == min(tried):
                ends.setdefault((key, "below"), name)
            if value == max(tried):
                ends.setdefault((key, "above"), name)
    return [(key, side, name) for (key, side), name in ends.items()]


def _has_an_equal(best: Trial, trials: Sequence[Trial], key: str, column: str) -> bool:
    """Return whether another value of a key was as good as the best one, if only when stopped."""
    for trial in trials:
        is_another = trial.method == best.method and trial.values[key] != best.values[key]
        if not is_another or trial.state == "failed":
            continue
        if text.direction(column) * (trial.value - best.value) >= 0:
            return True
    return False


# In words.


def described(grid: Grid, found: Searched, shares: Sequence[str]) -> list[str]:
    """Return how a search was made and how it went, in sentences.

    Args:
        grid: The search.
        found: What came of it.
        shares: The `data.validation` of each method.
    """
    keys = " and ".join(grid.values)
    seeds = text.named_seeds(grid.seeds)
    line = f"{keys}: the same values for each method, on {seeds}, by {found.metric}"
    if found.chosen_by != found.metric:
        line += " on validation samples"
        if len(set(shares)) == 1 and shares[0]:
            line += f", {100 * float(shares[0]):g} % of each client's training samples"
    elif is_metric(found.metric):
        line += " on test samples"

    notes = [line]
    if grid.ranges:
        axes = " and ".join(f"{key} from {axis.words}" for key, axis in grid.ranges.items())
        number = text.counted(len(grid.points), "trial")
        notes.append(
            f"{axes}: {number}, drawn as points of a Sobol sequence by seed {grid.draw_seed}"
        )
    return [*notes, *found.notes]


def _table(trials: Sequence[Trial], grid: Grid, column: str) -> DataFrame:
    """Return a search as a table of text.

    Lists have a row for each method, and draws a row for each trial.
    """
    if grid.ranges or grid.stops_early:
        return _table_by_trial(trials, grid, column)

    rows = []
    for name in dict.fromkeys(trial.method for trial in trials):
        own = [trial for trial in trials if trial.method == name]
        cells = {"search": name}
        for trial in own:
            head = ", ".join(trial.values.values())
            cells[head] = FAILED
            if trial.state == "finished":
                cells[head] = text.metric_text(column, trial.value)
        for trial in own:
            if trial.chosen:
                cells["chosen"] = ", ".join(trial.values.values())
                if grid.on_edge(trial.number - 1):
                    cells["chosen"] += EDGE
        rows.append(cells)
    return DataFrame(rows, dtype="str")


def _table_by_trial(trials: Sequence[Trial], grid: Grid, column: str) -> DataFrame:
    """Return a row for each trial: its values, and what each method has with them."""
    cells_of: dict[int, dict[str, str]] = {}
    for trial in trials:
        number = f"{trial.number}"
        if trial.extended:
            number += ", beyond a range"
        row = cells_of.setdefault(trial.number, {"trial": number, **trial.values})

        cell = FAILED
        if trial.state != "failed":
            cell = text.metric_text(column, trial.value)
        if trial.state == "stopped":
            cell += f", stopped after round {trial.rounds}"
        if trial.chosen:
            cell += ", chosen"
            if _is_at_an_end(trial, trials, grid):
                cell += " (edge of what was tried)"
        row[trial.method] = cell
    return DataFrame(list(cells_of.values()), dtype="str")


def _is_at_an_end(chosen: Trial, trials: Sequence[Trial], grid: Grid) -> bool:
    """Return whether a chosen value is the smallest or the largest that was tried of its range."""
    for key in grid.ranges:
        tried = {float(trial.values[key]) for trial in trials}
        if len(tried) > 1 and float(chosen.values[key]) in (min(tried), max(tried)):
            return True
    return False


def _notes_of_halving(candidates: Candidates, grid: Grid) -> list[str]:
    """Return which trials are stopped early, as notes."""
    if not grid.stops_early:
        return []

    rounds_of = {}
    for tried in candidates.values():
        pauses = [pause_of(tried[0], part) for part in HALVINGS]
        rounds_of[tuple(dict.fromkeys(pauses))] = tried[0].limits.get("max_epochs")
    parts = []
    for pauses_of_method, rounds in rounds_of.items():
        known = [str(pause) for pause in pauses_of_method if pause is not None]
        if not known:
            parts.append("no trial is stopped early: a run has no evaluation before its last round")
            continue
        word = "round" if len(known) == 1 else "rounds"
        parts.append(
            f"after {word} {' and '.join(known)} of {rounds} the better half of a method's trials "
            "goes on, by the mean over the seeds of the search; the others are stopped, by the "
            "same rule for every method"
        )
    return parts
