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

from lightfed.results import outcome
from lightfed.results.columns import base_name
from lightfed.results.mixtures import combination, level_counts
from lightfed.results.run import Run
from lightfed.results.settings import gathered, options, told_apart
from lightfed.results.units import metric_text, spread_text

if TYPE_CHECKING:
    from pandas import DataFrame

SEED = re.compile(r"[-_./]?(?:seed|s)[-_.=]?\d+$", re.IGNORECASE)
# what labels leave out: the algorithm, which they begin with, and what levels and conditions name
NO_LABEL = re.compile(
    r"model\.(algorithm(\.class_path)?|clients\.\d+\.(count|level|rate))$"
    r"|data\.(dataset|partition)\b"
)
NO_DATA = re.compile(r"(?!data\.(dataset|partition)\b)|data\.dataset(\.class_path)?$")


@dataclass(frozen=True)
class Group:
    """One row of a comparison: one run, or several of different seeds.

    Attributes:
        name: folder of the only run, or of the first without its seed; says so if no run is
            finished.
        runs: one of each seed; the finished ones, or of all if none is.
        label: its method, and in what that differs from others; the name if nothing is known.
        condition: its data set, and in what the data differ from those of others.
        place: of its colour and dash, the same for equal labels; the first label of each method
            comes before all others.
    """

    name: str
    runs: tuple[Run, ...]
    label: str = field(default="", compare=False)
    condition: str = field(default="", compare=False)
    place: int = field(default=0, compare=False)

    @property
    def data(self) -> str:
        return self.runs[0].data

    @property
    def algorithm(self) -> str:
        return self.runs[0].algorithm

    def score(self, column: str) -> tuple[float, float]:
        """The last finite values in a column: mean and sample deviation over the runs."""
        return outcome.mean_and_std([run.final(column) for run in self.runs])

    def interval(self, column: str) -> tuple[float, float, float, int]:
        """Of the runs whose last value is finite: mean, 95 % t interval (NaN below two), number."""
        known = sum(math.isfinite(run.final(column)) for run in self.runs)
        mean, std = self.score(column)
        half = outcome.t_half_width(std, known)
        return mean, mean - half, mean + half, known

    def course(self, column: str) -> DataFrame:
        """A metric by round, in the rounds in which every run measured it.

        Columns: `sent` (mean bytes up and down since the start, NaN if unknown), `mean` and `std`
        (sample) over the runs, `low` and `high` (95 % t interval of the mean), `n` runs. A single
        run has no std and no interval.
        """
        import pandas as pd

        values = pd.concat([run.series(column) for run in self.runs], axis=1, join="inner")
        values = values.dropna()
        sent = pd.concat([outcome.traffic(run) for run in self.runs], axis=1).loc[values.index]
        mean, std, n = values.mean(axis=1), values.std(axis=1), len(self.runs)
        half = outcome.t_half_width(std, n)
        own = {"mean": mean, "std": std, "low": mean - half, "high": mean + half, "n": n}
        return pd.DataFrame({"sent": sent.mean(axis=1, skipna=False)} | own)


def runs_of(groups: Iterable[Group]) -> list[Run]:
    return [run for group in groups for run in group.runs]


def synthetic_note(groups: Iterable[Group]) -> str:
    """For the end of a title: says so if a run used synthetic data."""
    return max((run.note for run in runs_of(groups)), default="")


def usual_metric(groups: Iterable[Group]) -> str:
    """The metric that most runs show first, without `global/` or `personal/`."""
    names = [base_name(outcome.primary_metric(run)) for run in runs_of(groups)]
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
    """A row per run."""
    return _described([[run] for run in runs], seeds=True)


def grouped(runs: Sequence[Run]) -> list[Group]:
    """A row per experiment, in the order of their first runs."""
    return _described([*gathered(runs, lambda run: run.experiment["digest"]).values()])


def _described(rows: Sequence[Sequence[Run]], *, seeds: bool = False) -> list[Group]:
    """With names, conditions, labels and places; with `seeds` labels may name the seed.

    If some of an algorithm on the same data do not differ, all of this algorithm keep their names.
    """
    ended = [[run for run in own if run.finished] or own for own in rows]
    found = [Group("", tuple(outcome.each_seed_once(own))) for own in ended]
    parent = common_parent(runs_of(found)) if found else Path()
    paths = [os.path.relpath(group.runs[0].folder.absolute(), parent) for group in found]
    short = [SEED.sub("", p) if len(g.runs) > 1 else p for g, p in zip(found, paths, strict=True)]
    data = [{k: v for k, v in data_terms(group).items() if k != "data"} for group in found]
    texts = [text.replace("partition ", "") for text in told_apart(data)]
    for i, group in enumerate(found):
        name = (short[i] if short[i] and short.count(short[i]) == 1 else paths[i]) + _end(group)
        condition = ", ".join(filter(None, (group.data, texts[i])))
        found[i] = replace(group, name=name, label=name, condition=condition)
    elsewhere = len({group.condition for group in found}) > 1
    methods = gathered(range(len(found)), lambda i: found[i].algorithm)
    for method, places in methods.items():
        own = [found[i] for i in places]
        terms = [terms_of(group) | {"condition": group.condition} for group in own]
        if seeds:
            terms = [one | {"seed": str(g.runs[0].seed)} for one, g in zip(terms, own, strict=True)]
        texts = told_apart(terms, known="condition")
        whole = len(methods) > 1 or (elsewhere and not all(texts))
        labels = [", ".join(filter(None, (method * whole, text))) for text in texts]
        unlike = {(g.condition, label) for g, label in zip(own, labels, strict=True)}
        if all(labels) and len(unlike) == len(own):
            for i, label in zip(places, labels, strict=True):
                found[i] = replace(found[i], label=label + _end(found[i]))
    first = [found[places[0]].label for places in methods.values()]
    order = list(dict.fromkeys([*first, *(group.label for group in found)]))
    return [replace(group, place=order.index(group.label)) for group in found]


def _end(group: Group) -> str:
    return "" if group.runs[0].finished else " (not finished)"


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
