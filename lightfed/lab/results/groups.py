"""Experiments: runs that differ only in the seed, or single runs; their labels and intervals."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightfed.lab.results import text
from lightfed.lab.results.paired import mean_and_std, t_half_width
from lightfed.lab.results.run import TIME, Run, base_name, primary_metric, traffic
from lightfed.utils.keys import LEVELS, column_of, long_name

if TYPE_CHECKING:
    from pandas import DataFrame

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
SEED = re.compile(r"[-_./]?(?:seed|s)[-_.=]?\d+$", re.IGNORECASE)
# what labels leave out: the algorithm, which they begin with, and what levels and conditions name
NO_LABEL = re.compile(
    r"model\.(algorithm(\.class_path)?|clients\.\d+\.(count|level|rate))$"
    r"|data\.(dataset|partition)\b"
)
NO_DATA = re.compile(r"(?!data\.(dataset|partition)\b)|data\.dataset(\.class_path)?$")
LAST = ("max_epochs", "lr_schedule")  # they follow from what experiments are about
NAMELESS = ("levels", "optimizer", "partition")  # settings whose values explain themselves
NOTHING_ELSE = re.compile(r"(?!)")
UNEVEN = 0.05  # of the clients: rounding error of a level's share that still counts as equal


@dataclass(frozen=True)
class Group:
    """One row of a comparison: one run, or several of different seeds.

    Attributes:
        name: folder of the only run, or of the first without its seed; says so if no run is
            finished.
        runs: one of each seed; the finished ones, or of all if none is.
        label: its method, and in what that differs from others on the same data.
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
    def algorithm(self) -> str:
        return self.runs[0].algorithm

    def score(self, column: str) -> tuple[float, float]:
        """Of the finite last values in a column: mean, half its 95 % t interval (NaN below two)."""
        ends = [run.final(column) for run in self.runs]
        mean, std = mean_and_std(ends)
        return mean, t_half_width(std, sum(map(math.isfinite, ends)))

    def finals(self, column: str) -> dict[int, float]:
        """The last values in a column by seed, of finished runs."""
        return {r.seed: r.final(column) for r in self.runs if r.finished and r.seed is not None}

    def course(self, column: str) -> DataFrame:
        """A metric by round, in the rounds in which every run measured it.

        Columns: `sent` and `time` (bytes up and down, and virtual seconds, since the start, means
        over the runs, NaN if unknown), `mean` over the runs, `low` and `high` (its 95 % t interval,
        NaN for a single run).
        """
        import pandas as pd

        values = pd.concat([run.series(column) for run in self.runs], axis=1, join="inner")
        values = values.dropna()
        sent = pd.concat([traffic(run) for run in self.runs], axis=1).loc[values.index]
        mean, half = values.mean(axis=1), t_half_width(values.std(axis=1), len(self.runs))
        own = {"mean": mean, "low": mean - half, "high": mean + half}
        time = pd.concat([run.series(TIME) for run in self.runs], axis=1).reindex(values.index)
        costs = {"sent": sent.mean(axis=1, skipna=False), "time": time.mean(axis=1, skipna=False)}
        return pd.DataFrame(costs | own)


def singles(runs: Sequence[Run]) -> list[Group]:
    """A row per run."""
    return _described([[run] for run in runs])


def grouped(runs: Sequence[Run]) -> list[Group]:
    """A row per experiment, in the order of their first runs."""
    return _described([*gathered(runs, lambda run: run.digest).values()])


def _described(rows: Sequence[Sequence[Run]]) -> list[Group]:
    """With names, conditions, labels and places."""
    members = [each_seed_once([run for run in own if run.finished] or own) for own in rows]
    firsts = [own[0] for own in members]
    parent = common_parent(firsts) if firsts else Path()
    paths = [os.path.relpath(run.folder.absolute(), parent) for run in firsts]
    short = [SEED.sub("", path) * (len(own) > 1) for path, own in zip(paths, members, strict=True)]
    names = [s if s and short.count(s) == 1 else p for s, p in zip(short, paths, strict=True)]
    terms = [options(r.settings, but=NO_DATA) | {"clients": f"{r.num_clients}"} for r in firsts]
    data = [said.replace("partition ", "") for said in told_apart(terms)]
    conditions = [", ".join(filter(None, (r.data, d))) for r, d in zip(firsts, data, strict=True)]
    methods = gathered(range(len(rows)), lambda i: firsts[i].algorithm)
    telling = [
        _label_terms(own) | {"condition": said}
        for own, said in zip(members, conditions, strict=True)
    ]
    labels = {
        i: ", ".join(filter(None, (method, said)))
        for method, own in methods.items()
        for i, said in zip(own, told_apart([telling[i] for i in own], "condition"), strict=True)
    }
    alike = Counter((conditions[i], label) for i, label in labels.items())
    for i, run in enumerate(firsts):
        end = "" if run.finished else " (not finished)"
        twin = alike[conditions[i], labels[i]] > 1
        labels[i] += f", {names[i]}" * twin + end
        names[i] += end
    order = [*dict.fromkeys([labels[i] for i in (*(own[0] for own in methods.values()), *labels)])]
    return [
        Group(names[i], tuple(own), labels[i], conditions[i], order.index(labels[i]))
        for i, own in enumerate(members)
    ]


def _label_terms(runs: Sequence[Run]) -> dict[str, str]:
    """What a label may say besides the method, the most telling first; of a single run its seed."""
    levels = level_counts(runs[0].settings)
    mixture = {"levels": combination(levels)} if levels else {}
    seed = {"seed": str(runs[0].seed)} if len(runs) == 1 else {}
    return mixture | options(runs[0].settings, but=NO_LABEL) | seed


def told_apart(options: Sequence[Mapping[str, str]], known: str = "") -> list[str]:
    """Few settings that tell experiments apart: `lr 0.1`; equal ones get equal texts.

    Earlier settings are preferred, and all to those of LAST. Empty where none is needed. The values
    of NAMELESS stand alone; readers know the setting `known`.
    """
    chosen = [known]
    names = dict.fromkeys(name for one in options for name in one)
    for name in sorted(names, key=lambda name: name.startswith(LAST)):
        tried = [tuple(one.get(key) for key in (*chosen, name)) for one in options]
        if len(set(tried)) > len({values[:-1] for values in tried}):
            chosen.append(name)
    texts = [{name: one[name] for name in chosen[1:] if name in one} for one in options]
    return [
        ", ".join(value if name in NAMELESS else f"{name} {value}" for name, value in own.items())
        for own in texts
    ]


def options(
    settings: Mapping[str, str],
    *,
    but: re.Pattern[str] = NOTHING_ELSE,
    unspoken: re.Pattern[str] = NOTHING_ELSE,
) -> dict[str, str]:
    """The settings of an experiment by their names in reports; classes by their own.

    `but` matches keys to leave out, `unspoken` the beginning of a key to drop from its name. Keys
    that would share a name have longer ones, such as `algorithm lr` and `optimizer lr`.
    """
    texts = {k: v for k, v in settings.items() if not but.match(k)}
    names = {key: column_of(unspoken.sub("", key)) for key in texts}
    times = Counter(names.values())
    return {
        name if times[name] == 1 else long_name(key): (
            texts[key].rsplit(".", 1)[-1] if key.endswith("class_path") else texts[key]
        )
        for key, name in names.items()
    }


def level_counts(settings: Mapping[str, str]) -> dict[float, int]:
    """Clients by rate, the widest first; a group without `rate` and `level` has rate 1."""
    counts: Counter[float] = Counter()
    groups = (f"model.clients.{place}" for place in count())
    for group in takewhile(lambda group: f"{group}.count" in settings, groups):
        width = settings.get(f"{group}.rate", LEVELS.get(settings.get(f"{group}.level", ""), 1.0))
        counts[float(width)] += int(settings[f"{group}.count"])
    return dict(sorted(counts.items(), reverse=True))


def level_name(rate: float) -> str:
    """The letter of the rate, or the rate itself (HeteroFL, Diao et al., ICLR 2021)."""
    return next((level for level, width in LEVELS.items() if width == rate), f"{rate:g}")


def combination(counts: Mapping[float, int]) -> str:
    """`a-e` for equal shares, else shares in tenths, or in smallest numbers: `a2-b8`.

    Counts are those of clients by rate, the widest first. Shares are equal up to rounding to whole
    clients.
    """
    clients, spread = sum(counts.values()), max(counts.values()) - min(counts.values())
    if spread < len(counts) and spread <= UNEVEN * clients:
        return "-".join(map(level_name, counts))
    tenths = all(10 * number % clients == 0 for number in counts.values())
    unit = clients / 10 if tenths else math.gcd(*counts.values())
    return "-".join(f"{level_name(rate)}{number / unit:.0f}" for rate, number in counts.items())


def each_seed_once(runs: Sequence[Run]) -> list[Run]:
    """The longest run of each seed: two of one seed have the same bits and would count double."""
    longest = {run.seed: run for run in sorted(runs, key=lambda run: len(run.rounds))}
    return [run for run in runs if run in longest.values()]


def common_parent(runs: Sequence[Run]) -> Path:
    """The deepest folder that holds all the runs; relative if it is below the current one."""
    parent = Path(os.path.commonpath([run.folder.absolute().parent for run in runs]))
    return parent.relative_to(Path.cwd()) if parent.is_relative_to(Path.cwd()) else parent


def gathered(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in the order of each key's first item."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def runs_of(groups: Iterable[Group]) -> list[Run]:
    return [run for group in groups for run in group.runs]


def synthetic_note(groups: Iterable[Group]) -> str:
    """For the end of a title: says so if a run used synthetic data."""
    return max((run.note for run in runs_of(groups)), default="")


def usual_metric(groups: Iterable[Group]) -> str:
    """The metric that most runs show first, without `global/` or `personal/`."""
    names = [base_name(primary_metric(run)) for run in runs_of(groups)]
    return Counter(names).most_common(1)[0][0]


def final_text(group: Group, column: str, *, std: bool = False) -> str:
    """The last value in a column, with half of its 95 % t interval if there are several runs.

    With `std`, with the sample deviation over the seeds instead. Says of how many, if that of a run
    is not finite or missing.
    """
    ends = [run.final(column) for run in group.runs if run.has(column)]
    known = sum(map(math.isfinite, ends))
    if not known:
        return text.metric_text(column, max(ends, default=math.nan))
    seeds = f", {known} of {len(group.runs)} seeds" if known < len(group.runs) else ""
    spread = mean_and_std(ends) if std else group.score(column)
    return text.metric_text(column, *spread) + seeds


def interval_head(rows: Iterable[Group], *, std: bool = False) -> str:
    """For the end of a column's head: what follows the sign +- in its cells."""
    what = "std over seeds" if std else "95 % interval"
    return f" ({what})" * any(len(row.runs) > 1 for row in rows)


def best_of(scores: Mapping[Item, float], metric: str) -> Item:
    """The key of the best of at least one score."""
    return max(scores, key=lambda item: text.direction(metric) * scores[item])


def reached_by_all(runs: Iterable[Run], column: str) -> float:
    """The value that all runs with this column reach: the worst of their best. NaN without any."""
    reached = [value for run in runs if math.isfinite(value := run.best(column)[0])]
    return min(reached, key=lambda value: text.direction(column) * value, default=math.nan)


def cost_to(target: float, run: Run, column: str) -> dict[str, float]:
    """What a run spent until a column first reached a target, by name; NaN if it did not.

    Rounds, bytes and FLOPs of all clients, wall-clock and virtual seconds.
    """
    flops, seconds = (run.series(name).fillna(0.0).cumsum() for name in ("flops", "seconds"))
    spent = {
        "rounds": run.rounds.index.to_series(),
        "bytes": traffic(run),
        "FLOPs": flops,
        "seconds": seconds,
        TIME: run.series(TIME),
    }
    reached = text.direction(column) * (run.series(column) - target) >= 0
    return {name: at[reached].iloc[0] if reached.any() else math.nan for name, at in spent.items()}
