"""The rows of a comparison: single runs, or groups of runs that differ only in the seed."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from lightfed.results.columns import base_name
from lightfed.results.mixtures import combination, level_counts
from lightfed.results.outcome import (
    each_seed_once,
    mean_and_std,
    primary_metric,
    t_half_width,
    traffic,
)
from lightfed.results.run import Run
from lightfed.results.settings import gathered, of_experiment, options, told_apart
from lightfed.results.units import metric_text, spread_text

if TYPE_CHECKING:
    from pandas import DataFrame

SEED_SUFFIX = re.compile(r"[-_.]?(?:seed|s)[-_.=]?\d+$", re.IGNORECASE)
STATED = re.compile(r"(model\.algorithm|data\.dataset)(\.class_path)?$")  # in environment.json
RUNNING = " (not finished)"


@dataclass(frozen=True)
class Group:
    """One row of a comparison: one run, or several of different seeds.

    Attributes:
        name: the common part of the runs' names; says so if no run is finished.
        runs: one of each seed; the finished ones, or of all if none is.
        left_out: the others, whose last metrics are from an earlier round, or of a seed again.
        label: what differs between the groups of a comparison; the name if nothing is known.
        place: of its colour and dash; the first group of each method comes before all others.
        method_place: that of the first group of its method.
    """

    name: str
    runs: tuple[Run, ...]
    left_out: tuple[Run, ...] = ()
    label: str = field(default="", compare=False)
    place: int = field(default=0, compare=False)
    method_place: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)

    @property
    def data(self) -> str:
        return self.runs[0].data

    @property
    def algorithm(self) -> str:
        return self.runs[0].algorithm

    def score(self, column: str) -> tuple[float, float]:
        """The last finite values in a column: mean and sample deviation over the runs."""
        return mean_and_std([run.final(column) for run in self.runs])

    def interval(self, column: str) -> tuple[float, float, float, int]:
        """Of the runs whose last value is finite: mean, 95 % t interval (NaN below two), number."""
        known = [value for run in self.runs if math.isfinite(value := run.final(column))]
        mean, std = mean_and_std(known)
        half = t_half_width(std, len(known))
        return mean, mean - half, mean + half, len(known)

    def course(self, column: str) -> DataFrame:
        """A metric by round, in the rounds in which every run measured it.

        Columns: `sent` (mean bytes up and down since the start, NaN if unknown), `mean` and `std`
        (sample) over the runs, `low` and `high` (95 % t interval of the mean), `n` runs. A single
        run has no std and no interval.
        """
        import pandas as pd

        values = pd.concat([run.series(column) for run in self.runs], axis=1, join="inner")
        values = values.dropna()
        sent = pd.concat([traffic(run) for run in self.runs], axis=1).loc[values.index]
        mean, std, n = values.mean(axis=1), values.std(axis=1), len(self.runs)
        half = t_half_width(std, n)
        own = {"mean": mean, "std": std, "low": mean - half, "high": mean + half, "n": n}
        return pd.DataFrame({"sent": sent.mean(axis=1, skipna=False)} | own)


@dataclass(frozen=True, eq=False)
class Experiment:
    """Runs that differ only in the seed, and their settings by short names (`options`)."""

    group: Group
    options: Mapping[str, str] = field(repr=False)

    @property
    def data(self) -> str:
        return self.group.data

    @property
    def algorithm(self) -> str:
        return self.group.algorithm


Member = TypeVar("Member", bound=Experiment | Group)


@dataclass(frozen=True)
class Study(Generic[Member]):
    """Experiments that are shown together, in their order, with what they have in common as name.

    `metric` is what is drawn, without `global/` or `personal/`.
    """

    name: str
    metric: str
    members: tuple[Member, ...]

    @property
    def note(self) -> str:
        return synthetic_note(self.members)


def studied(members: Iterable[Member], name: Callable[[Member], str]) -> list[Study[Member]]:
    """A study for each name, with the metric that most of its runs show first."""
    found = gathered(members, name).items()
    return [Study(name, usual_metric(own), tuple(own)) for name, own in found]


def runs_of(members: Iterable[Experiment | Group]) -> list[Run]:
    groups = (one.group if isinstance(one, Experiment) else one for one in members)
    return [run for group in groups for run in group.runs]


def synthetic_note(members: Iterable[Experiment | Group]) -> str:
    """For the end of a title: says so if a run used synthetic data."""
    return max((run.note for run in runs_of(members)), default="")


def usual_metric(members: Iterable[Experiment | Group]) -> str:
    """The metric that most runs show first, without `global/` or `personal/`."""
    names = [base_name(primary_metric(run)) for run in runs_of(members)]
    return Counter(names).most_common(1)[0][0]


def final_text(group: Group, column: str) -> str:
    """The last value in a column, with half of its 95 % t interval if there are several runs.

    Says of how many, if that of a run is not finite or missing.
    """
    mean, low, _, known = group.interval(column)
    if not known:
        ends = (run.final(column) for run in group.runs if run.has(column))
        return metric_text(column, max(ends, default=math.nan))
    text, runs = spread_text(column, mean, mean - low), len(group.runs)
    return f"{text}, {known} of {runs} seeds" if known < runs else text


def singles(runs: Sequence[Run]) -> list[Group]:
    """A row per run, named by its name, or by its path if two runs have the same name."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        parent = common_parent(runs)
        names = [os.path.relpath(run.folder.absolute(), parent) for run in runs]
    groups = [_group(name, [run]) for name, run in zip(names, runs, strict=True)]
    return _placed(_labelled(groups, [{"seed": str(run.seed)} for run in runs]))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """A row per experiment, in the order of their first runs."""
    groups, times = [], Counter[str]()
    for found in gathered(runs, identity).values():
        name = _name(found)
        times[name] += 1
        groups.append(_group(f"{name} #{times[name]}" if times[name] > 1 else name, found))
    named = [
        replace(group, name=group.label) if times[group.name.partition(" #")[0]] > 1 else group
        for group in _labelled(groups, [{}] * len(groups))  # `digits #2` says nothing in a table
    ]
    return _placed(named)


def _group(name: str, runs: Sequence[Run]) -> Group:
    counted = each_seed_once([run for run in runs if run.finished] or runs)
    others = tuple(run for run in runs if run not in counted)
    return Group(name + RUNNING * (not counted[0].finished), tuple(counted), others)


def _labelled(groups: Sequence[Group], further: Sequence[Mapping[str, str]]) -> list[Group]:
    """With labels that say in what the groups differ.

    If some of an algorithm do not differ, all groups of this algorithm keep their names.
    """
    terms = [{**terms_of(group), **own} for group, own in zip(groups, further, strict=True)]
    labels = told_apart(terms)
    methods = [one.get("method", "") for one in terms]
    times = Counter(labels)
    unclear = {m for m, label in zip(methods, labels, strict=True) if not label or times[label] > 1}
    return [
        group
        if method in unclear
        else replace(group, label=label + RUNNING * group.name.endswith(RUNNING))
        for group, label, method in zip(groups, labels, methods, strict=True)
    ]


def _placed(groups: Sequence[Group]) -> list[Group]:
    """With the places of their colours and dashes."""
    methods = list(dict.fromkeys(group.algorithm for group in groups))
    free, taken, found = iter(range(len(methods), len(groups))), set[str](), []
    for group in groups:
        first = methods.index(group.algorithm)
        place = next(free) if group.algorithm in taken else first
        taken.add(group.algorithm)
        found.append(replace(group, place=place, method_place=first))
    return found


def terms_of(group: Group) -> dict[str, str]:
    """What a label may say, the most telling first."""
    run = group.runs[0]
    stated = {"method": run.environment.get("algorithm"), "data": run.environment.get("dataset")}
    known = {key: str(text) for key, text in stated.items() if text is not None}
    levels = level_counts(run.settings)
    mixture = {"levels": combination(levels)} if levels else {}
    return known | mixture | options(run.settings, but=STATED)


def identity(run: Run) -> frozenset[tuple[str, str]]:
    """A key that runs share if they differ only in the seed.

    It is the configuration without seeds, and without where and how the run was made, with the
    digests of its data. Without a configuration it is the name without the seed, and the settings
    in environment.json.
    """
    if run.config is None:
        keys = ("algorithm", "dataset", "clients", "rounds")
        stated = ((key, str(run.environment.get(key))) for key in keys)
        return frozenset((("name", _stem(run.name)), *stated, *run.settings.items()))
    return of_experiment(run.settings, {run.name, run.folder.absolute().name})


def common_parent(runs: Sequence[Run]) -> Path:
    """The deepest folder that holds all the runs; relative if it is below the current one."""
    parent = Path(os.path.commonpath([run.folder.absolute().parent for run in runs]))
    return parent.relative_to(Path.cwd()) if parent.is_relative_to(Path.cwd()) else parent


def _stem(name: str) -> str:
    return SEED_SUFFIX.sub("", name) or name


def _name(runs: Sequence[Run]) -> str:
    """The common part of the runs' names."""
    names = [run.name for run in runs]
    stems = {_stem(name) for name in names} if len(names) > 1 else {*names}
    if len(stems) == 1:
        return stems.pop()
    return os.path.commonprefix(names).rstrip("-_. ") or names[0]  # noqa: RUF071 - no paths


def tidy(groups: Sequence[Group]) -> DataFrame:
    """The final values of all runs, a row a run and metric of the whole run.

    Columns: `run`, `label`, `method`, `data`, `seed`, `finished`, `metric`, `value`.
    """
    import pandas as pd

    rows = [
        (*about, column, run.final(column))
        for group in groups
        for run in (*group.runs, *group.left_out)
        for about in [(run.name, group.label, run.algorithm, run.data, run.seed, run.finished)]
        for column in map(str, run.rounds)
        if "/" in column and column not in run.client_group_columns and run.has(column)
    ]
    names = ["run", "label", "method", "data", "seed", "finished", "metric", "value"]
    return pd.DataFrame(rows, columns=pd.Index(names))


def courses(groups: Sequence[Group], columns: Sequence[str]) -> DataFrame:
    """`Group.course` of several groups and columns of metrics.csv, one below the other.

    Columns: `label`, `metric`, `round` and those of `Group.course`.
    """
    import pandas as pd

    found = {(g.label, column): g.course(column) for g in groups for column in columns}
    return pd.concat(found, names=["label", "metric"]).reset_index()
