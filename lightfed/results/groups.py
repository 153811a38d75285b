"""The rows of a comparison: single runs, or groups of runs that differ only in the seed."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from lightfed.results.settings import gathered, options, told_apart
from lightfed.results.units import metric_text, spread_text

if TYPE_CHECKING:
    from pandas import DataFrame

SEED_SUFFIX = re.compile(r"[-_.]?(?:seed|s)[-_.=]?\d+$", re.IGNORECASE)
# what labels leave out: the algorithm, which they begin with, and what levels and conditions name
NO_LABEL = re.compile(
    r"model\.(algorithm(\.class_path)?|clients\.\d+\.(count|level|rate))$"
    r"|data\.(dataset|partition)\b"
)
NO_DATA = re.compile(r"(?!data\.(dataset|partition)\b)|data\.dataset(\.class_path)?$")
RUNNING = " (not finished)"


@dataclass(frozen=True)
class Group:
    """One row of a comparison: one run, or several of different seeds.

    Attributes:
        name: that of the only run, or of the first without its seed; says so if no run is finished.
        runs: one of each seed; the finished ones, or of all if none is.
        label: its method, and in what that differs from others; the name if nothing is known.
        condition: its data set, and in what the data differ from those of others.
        place: of its colour and dash, the same for equal labels; the first label of each method
            comes before all others.
        method_place: that of the first label of its method.
    """

    name: str
    runs: tuple[Run, ...]
    label: str = field(default="", compare=False)
    condition: str = field(default="", compare=False)
    place: int = field(default=0, compare=False)
    method_place: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)
        object.__setattr__(self, "condition", self.condition or self.data)

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


def runs_of(groups: Iterable[Group]) -> list[Run]:
    return [run for group in groups for run in group.runs]


def synthetic_note(groups: Iterable[Group]) -> str:
    """For the end of a title: says so if a run used synthetic data."""
    return max((run.note for run in runs_of(groups)), default="")


def usual_metric(groups: Iterable[Group]) -> str:
    """The metric that most runs show first, without `global/` or `personal/`."""
    names = [base_name(primary_metric(run)) for run in runs_of(groups)]
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


def final_heading(name: str, groups: Iterable[Group]) -> str:
    """The heading of `final_text`, which says what follows a `+-`."""
    return f"{name} (95 % interval)" if any(len(group.runs) > 1 for group in groups) else name


def singles(runs: Sequence[Run]) -> list[Group]:
    """A row per run, named by its name, or by its path if two runs have the same name."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        parent = common_parent(runs)
        names = [os.path.relpath(run.folder.absolute(), parent) for run in runs]
    groups = [_group(name, [run]) for name, run in zip(names, runs, strict=True)]
    return _described(groups, [{"seed": str(run.seed)} for run in runs])


def grouped(runs: Sequence[Run]) -> list[Group]:
    """A row per experiment, in the order of their first runs."""
    found = [*gathered(runs, lambda run: run.experiment["digest"]).values()]
    names, times = [_name(own) for own in found], Counter[str]()
    groups = []
    for name, own in zip(names, found, strict=True):
        times[name] += 1
        groups.append(_group(f"{name} #{times[name]}" if times[name] > 1 else name, own))
    return [
        replace(group, name=group.label) if times[name] > 1 else group
        for name, group in zip(names, _described(groups, [{}] * len(groups)), strict=True)
    ]


def _group(name: str, runs: Sequence[Run]) -> Group:
    counted = each_seed_once([run for run in runs if run.finished] or runs)
    return Group(name + RUNNING * (not counted[0].finished), tuple(counted))


def _described(groups: Sequence[Group], further: Sequence[dict[str, str]]) -> list[Group]:
    """With conditions, labels and places.

    If some of an algorithm on the same data do not differ, all of this algorithm keep their names.
    """
    found = [replace(g, condition=c) for g, c in zip(groups, _conditions(groups), strict=True)]
    methods = gathered(range(len(found)), lambda i: found[i].algorithm)
    elsewhere = len({group.condition for group in found}) > 1
    for method, places in methods.items():
        texts = told_apart([terms_of(found[i]) | further[i] for i in places])
        named = len(methods) > 1 or (elsewhere and not all(texts))
        labels = [", ".join(filter(None, (method * named, text))) for text in texts]
        unlike = {(found[i].condition, label) for i, label in zip(places, labels, strict=True)}
        if all(labels) and len(unlike) == len(places):
            for i, label in zip(places, labels, strict=True):
                end = RUNNING * found[i].name.endswith(RUNNING)
                found[i] = replace(found[i], label=label + end)
    first = {group.algorithm: group.label for group in found[::-1]}
    every = [*dict.fromkeys([*(first[name] for name in methods), *(g.label for g in found)])]
    return [
        replace(g, place=every.index(g.label), method_place=every.index(first[g.algorithm]))
        for g in found
    ]


def _conditions(groups: Sequence[Group]) -> list[str]:
    """What each was trained on: `Digits, alpha 0.3`, with no more than tells them apart."""
    settings = [data_terms(group) for group in groups]
    texts = told_apart([{k: v for k, v in one.items() if k != "data"} for one in settings])
    shorter = [text.replace("partition ", "") for text in texts]
    return [
        ", ".join(filter(None, pair))
        for pair in zip((g.data for g in groups), shorter, strict=True)
    ]


def data_terms(group: Group) -> dict[str, str]:
    """The data set, its partition, and the number of clients: equal where results compare."""
    run = group.runs[0]
    clients = {} if run.num_clients is None else {"clients": str(run.num_clients)}
    return {"data": run.data} | options(run.experiment["settings"], but=NO_DATA) | clients


def terms_of(group: Group) -> dict[str, str]:
    """What a label may say besides the method, the most telling first."""
    settings = group.runs[0].experiment["settings"]
    levels = level_counts(settings)
    mixture = {"levels": combination(levels)} if levels else {}
    return mixture | options(settings, but=NO_LABEL)


def common_parent(runs: Sequence[Run]) -> Path:
    """The deepest folder that holds all the runs; relative if it is below the current one."""
    parent = Path(os.path.commonpath([run.folder.absolute().parent for run in runs]))
    return parent.relative_to(Path.cwd()) if parent.is_relative_to(Path.cwd()) else parent


def _name(runs: Sequence[Run]) -> str:
    """The name of the only run, or that of the first without its seed."""
    name = runs[0].name
    return (SEED_SUFFIX.sub("", name) or name) if len(runs) > 1 else name
