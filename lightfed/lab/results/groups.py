"""Experiments: runs that differ only in the seed, or single runs; their labels and intervals."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml  # type: ignore[import-untyped]

from lightfed.lab.results import text
from lightfed.lab.results.paired import mean_and_std, t_half_width
from lightfed.lab.results.run import ENERGY, TIME, Run, base_name, primary_metric, traffic
from lightfed.utils.keys import LEVELS, column_of, flat, key_of, long_name

if TYPE_CHECKING:
    from pandas import DataFrame

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

# The end of a folder's name that says the seed.
SEED = re.compile(r"[-_./]?(?:seed|s)[-_.=]?\d+$", re.IGNORECASE)

# Keys that labels do not name: the algorithm, which they begin with, and what levels and conditions
# say.
NO_LABEL = re.compile(
    r"model\.(algorithm(\.class_path)?|clients\.\d+\.(count|level|rate))$"
    r"|data\.(dataset|partition)\b"
)

# Keys that conditions do not name: all but the data, and the data set, which they begin with.
NO_DATA = re.compile(r"(?!data\.(dataset|partition)\b)|data\.dataset(\.class_path)?$")

# Settings that tell experiments apart only if no other does: they follow from what these are about.
LAST = ("max_epochs", "lr_schedule")

# Settings whose values explain themselves, so that their names are not said.
NAMELESS = ("levels", "optimizer", "partition")

# The head of a column names at most so many changed settings, and so many letters of a value.
MOST_CHANGES = 3
MOST_LETTERS = 28

# The sections of a configuration that describe an experiment.
_SECTIONS = ("trainer.", "model.", "data.")

# A pattern that matches nothing.
NO_KEY = re.compile(r"(?!)")

# Shares of levels that differ by no more than this part of the clients, by rounding, are equal.
UNEVEN = 0.05


@dataclass(frozen=True)
class Group:
    """One row of a comparison: one run, or several of different seeds.

    Attributes:
        name: The folder of the only run, or of the first one without its seed. It says so if no run
            is finished.
        runs: One run for each seed; the finished ones, or all if none is.
        label: The method, and in what it differs from others on the same data.
        condition: The data set, and in what its data differ from those of others.
        place: The position of its color and dash, which equal labels share. The first label of each
            method comes before all others.
    """

    name: str
    runs: tuple[Run, ...]
    label: str = field(default="", compare=False)
    condition: str = field(default="", compare=False)
    place: int = field(default=0, compare=False)

    @property
    def algorithm(self) -> str:
        """The class of the algorithm of its runs."""
        return self.runs[0].algorithm

    def score(self, column: str) -> tuple[float, float]:
        """Return the mean of the finite last values in a column, and half of its 95 % t interval.

        The latter is NaN for fewer than two values.
        """
        values = [run.final(column) for run in self.runs]
        mean, std = mean_and_std(values)
        return mean, t_half_width(std, _number_of_finite(values))

    def finals(self, column: str) -> dict[int, float]:
        """Return the last values in a column by seed, of finished runs."""
        value_of_seed = {}
        for run in self.runs:
            if run.finished and run.seed is not None:
                value_of_seed[run.seed] = run.final(column)
        return value_of_seed

    def course(self, column: str) -> DataFrame:
        """Return a metric by round, in the rounds in which every run measured it.

        Returns:
            A table with the columns `sent` and `time` for bytes up and down and virtual seconds
            since the start, as means over the runs, NaN if unknown; `mean` over the runs; `low` and
            `high` for the ends of its 95 % t interval, NaN for a single run.
        """
        import pandas as pd

        values = pd.concat([run.series(column) for run in self.runs], axis=1, join="inner")
        values = values.dropna()
        mean = values.mean(axis=1)
        half = t_half_width(values.std(axis=1), len(self.runs))

        sent = pd.concat([traffic(run) for run in self.runs], axis=1).loc[values.index]
        time = pd.concat([run.series(TIME) for run in self.runs], axis=1).reindex(values.index)
        return pd.DataFrame(
            {
                "sent": sent.mean(axis=1, skipna=False),
                "time": time.mean(axis=1, skipna=False),
                "mean": mean,
                "low": mean - half,
                "high": mean + half,
            }
        )


def singles(runs: Sequence[Run]) -> list[Group]:
    """Return a row for each run."""
    return _described([[run] for run in runs])


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Return a row for each experiment, in the order of their first runs."""
    runs_of_digest = gathered(runs, lambda run: run.digest)
    return _described(list(runs_of_digest.values()))


def _described(rows: Sequence[Sequence[Run]]) -> list[Group]:
    """Return rows of runs as groups with names, conditions, labels and places."""
    members = []
    for runs in rows:
        finished = [run for run in runs if run.finished]
        members.append(each_seed_once(finished or runs))
    firsts = [runs[0] for runs in members]

    names = _names(members)
    conditions = _conditions(firsts)
    labels = _labels(members, conditions)

    # A label that two rows on the same data share is told apart by settings that reports do not
    # usually name, and only without any such difference by their folders.
    rows_of_label = gathered(range(len(firsts)), lambda i: (conditions[i], labels[i]))
    for positions in rows_of_label.values():
        if len(positions) > 1:
            differences = told_apart([options(unnamed_settings(firsts[i])) for i in positions])
            for position, difference in zip(positions, differences, strict=True):
                labels[position] += f", {difference}" if difference else ""

    times = Counter(zip(conditions, labels, strict=True))
    for position, run in enumerate(firsts):
        if times[conditions[position], labels[position]] > 1:
            labels[position] += f", {names[position]}"
        if not run.finished:
            labels[position] += " (not finished)"
            names[position] += " (not finished)"

    place_of = _places(firsts, labels)
    groups = []
    for position, runs in enumerate(members):
        label = labels[position]
        groups.append(
            Group(
                name=names[position],
                runs=tuple(runs),
                label=label,
                condition=conditions[position],
                place=place_of[label],
            )
        )
    return groups


def _names(members: Sequence[Sequence[Run]]) -> list[str]:
    """Return the name of each row: its folder, without the seed if the row has several."""
    firsts = [runs[0] for runs in members]
    parent = common_parent(firsts) if firsts else Path()
    paths = [os.path.relpath(run.folder.absolute(), parent) for run in firsts]

    short_names = []
    for path, runs in zip(paths, members, strict=True):
        short_names.append(SEED.sub("", path) if len(runs) > 1 else "")

    names = []
    for path, short_name in zip(paths, short_names, strict=True):
        is_unique = short_name != "" and short_names.count(short_name) == 1
        names.append(short_name if is_unique else path)
    return names


def _conditions(firsts: Sequence[Run]) -> list[str]:
    """Return the condition of each row: its data set, and in what its data differ from others."""
    settings = [
        options(run.settings, but=NO_DATA) | {"clients": f"{run.num_clients}"} for run in firsts
    ]
    conditions = []
    for run, difference in zip(firsts, told_apart(settings), strict=True):
        details = difference.replace("partition ", "")
        conditions.append(f"{run.data}, {details}" if details else run.data)
    return conditions


def _labels(members: Sequence[Sequence[Run]], conditions: Sequence[str]) -> list[str]:
    """Return the label of each row: its method, and in what it differs from others on its data."""
    positions_of_method = gathered(range(len(members)), lambda i: members[i][0].algorithm)

    labels = [""] * len(members)
    for method, positions in positions_of_method.items():
        terms = [
            _label_terms(members[position]) | {"condition": conditions[position]}
            for position in positions
        ]
        # Conditions are shown beside the labels.
        differences = told_apart(terms, known="condition")
        for position, difference in zip(positions, differences, strict=True):
            labels[position] = ", ".join(part for part in (method, difference) if part)
    return labels


def _places(firsts: Sequence[Run], labels: Sequence[str]) -> dict[str, int]:
    """Return the place of each label: first the first label of each method, then the others.

    So a method has the same color whether one or many of its variants are shown.
    """
    positions_of_method = gathered(range(len(firsts)), lambda i: firsts[i].algorithm)
    order = [labels[positions[0]] for positions in positions_of_method.values()]
    for positions in positions_of_method.values():
        order += [labels[position] for position in positions]
    return {label: place for place, label in enumerate(dict.fromkeys(order))}


def _label_terms(runs: Sequence[Run]) -> dict[str, str]:
    """Return what the label of a row can say besides the method, the most telling first."""
    first = runs[0]
    terms = {}
    levels = level_counts(first.settings)
    if levels:
        terms["levels"] = combination(levels)

    terms |= options(first.settings, but=NO_LABEL)
    if len(runs) == 1:
        terms["seed"] = str(first.seed)
    return terms


def unnamed_settings(run: Run) -> dict[str, str]:
    """Return the settings by key that make another experiment and that labels do not name.

    They are read from config.yaml; there are none without it.
    """
    try:
        config = yaml.load(run.config, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return {}
    if not isinstance(config, dict):
        return {}

    settings = {}
    for key, value in flat(config):
        known = key_of(key)
        if not key.startswith(_SECTIONS) or known.role not in ("result", "extent"):
            continue
        if known.column is None and value not in ("null", "", None):
            settings[key] = str(value)
    return settings


def short_names(a: Group, b: Group) -> tuple[str, str]:
    """Return the names of two experiments for the heads of columns: what differs between them.

    These are the methods if they differ, and otherwise the changed settings, such as `lr 0.1`.
    Their folders are named only if nothing else tells them apart.
    """
    if a.algorithm != b.algorithm:
        return a.algorithm, b.algorithm

    terms = [_label_terms(group.runs) | _data_terms(group.runs[0]) for group in (a, b)]
    for own in terms:
        own.pop("seed", None)
    texts = _changes(*terms)
    if texts[0] == texts[1]:
        texts = _changes(*(options(unnamed_settings(group.runs[0])) for group in (a, b)))
    if texts[0] == texts[1]:
        return a.label, b.label
    return texts


def _data_terms(run: Run) -> dict[str, str]:
    """Return what tells the data of two experiments apart, by names for readers."""
    details = options(run.settings, but=NO_DATA)
    return {"data": run.data} | details | {"number of clients": f"{run.num_clients}"}


def _changes(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[str, str]:
    """Return for each of two experiments its values of the settings in which they differ."""
    changed = [name for name in {**a, **b} if a.get(name) != b.get(name)]

    # Settings of `LAST` follow from what other changes are about.
    telling = [name for name in changed if not name.startswith(LAST)]
    named = (telling or changed)[:MOST_CHANGES]

    texts = []
    for own, other in ((a, b), (b, a)):
        parts = []
        for name in named:
            if name not in own:
                parts.append(f"no {name}")
                continue
            value = _short(own[name], other.get(name, ""))
            # The value of a setting that only one has does not explain itself beside `no policy`.
            parts.append(value if name in NAMELESS and name in other else f"{name} {value}")
        if len(telling or changed) > MOST_CHANGES:
            parts.append("...")
        texts.append(", ".join(parts))
    return texts[0], texts[1]


def _short(value: str, other: str) -> str:
    """Return a value that fits into the head of a column, and still differs from the other one."""
    if len(value) <= MOST_LETTERS:
        return value
    start = f"{value[: MOST_LETTERS - 3]}..."
    end = f"...{value[3 - MOST_LETTERS :]}"
    if not other.startswith(value[: MOST_LETTERS - 3]):
        return start
    return value if other.endswith(value[3 - MOST_LETTERS :]) else end


def told_apart(options: Sequence[Mapping[str, str]], known: str = "") -> list[str]:
    """Return for each experiment few settings that tell it from the others, such as `lr 0.1`.

    Earlier settings are preferred, and all to those of `LAST`. The values of `NAMELESS` stand
    alone. Equal experiments get equal texts, which are empty where no setting is needed.

    Args:
        options: The settings of each experiment by name.
        known: A setting that readers know already.
    """
    names = dict.fromkeys(name for settings in options for name in settings)
    chosen = [known]
    for name in sorted(names, key=lambda name: name.startswith(LAST)):
        told_before = {tuple(settings.get(key) for key in chosen) for settings in options}
        told_with_it = {tuple(settings.get(key) for key in [*chosen, name]) for settings in options}
        if len(told_with_it) > len(told_before):
            chosen.append(name)

    texts = []
    for settings in options:
        parts = []
        for name in chosen[1:]:
            if name in settings:
                value = settings[name]
                parts.append(value if name in NAMELESS else f"{name} {value}")
        texts.append(", ".join(parts))
    return texts


def options(
    settings: Mapping[str, str],
    *,
    but: re.Pattern[str] = NO_KEY,
    unspoken: re.Pattern[str] = NO_KEY,
) -> dict[str, str]:
    """Return the settings of an experiment by their names in reports.

    Keys that would share a name have longer names, such as `algorithm lr` and `optimizer lr`. A
    class is named without its module.

    Args:
        settings: The settings by their dotted keys.
        but: Matches the keys to leave out.
        unspoken: Matches the beginning of a key that its name does not say.
    """
    chosen = {key: value for key, value in settings.items() if not but.match(key)}
    name_of_key = {key: column_of(unspoken.sub("", key)) for key in chosen}
    times = Counter(name_of_key.values())

    value_of_name = {}
    for key, value in chosen.items():
        name = name_of_key[key]
        if times[name] > 1:
            name = long_name(key)
        if key.endswith("class_path"):
            value = value.rpartition(".")[2]
        value_of_name[name] = value
    return value_of_name


def level_counts(settings: Mapping[str, str]) -> dict[float, int]:
    """Return the number of clients by rate, the widest first.

    A group without `rate` and `level` has rate 1.

    Args:
        settings: The settings of an experiment by their dotted keys.
    """
    clients_of_rate: Counter[float] = Counter()
    position = 0
    while f"model.clients.{position}.count" in settings:
        group = f"model.clients.{position}"
        level = settings.get(f"{group}.level", "")
        rate = settings.get(f"{group}.rate", LEVELS.get(level, 1.0))
        clients_of_rate[float(rate)] += int(settings[f"{group}.count"])
        position += 1
    return dict(sorted(clients_of_rate.items(), reverse=True))


def level_name(rate: float) -> str:
    """Return the letter of a rate, or the rate itself (HeteroFL, Diao et al., ICLR 2021)."""
    for level, level_rate in LEVELS.items():
        if level_rate == rate:
            return level
    return f"{rate:g}"


def combination(counts: Mapping[float, int]) -> str:
    """Return the levels of clients: `a-e` for equal shares, and `a2-b8` for others.

    Shares are equal up to rounding to whole clients. Others are in tenths, or else in the smallest
    whole numbers.

    Args:
        counts: The number of clients by rate, the widest first.
    """
    clients = sum(counts.values())
    spread = max(counts.values()) - min(counts.values())
    are_equal = spread < len(counts) and spread <= UNEVEN * clients
    if are_equal:
        return "-".join(map(level_name, counts))

    are_tenths = all(10 * number % clients == 0 for number in counts.values())
    unit = clients / 10 if are_tenths else math.gcd(*counts.values())
    return "-".join(f"{level_name(rate)}{number / unit:.0f}" for rate, number in counts.items())


def each_seed_once(runs: Sequence[Run]) -> list[Run]:
    """Return the longest run of each seed: two of one seed have the same bits, and count once."""
    longest = {run.seed: run for run in sorted(runs, key=lambda run: len(run.rounds))}
    return [run for run in runs if run in longest.values()]


def common_parent(runs: Sequence[Run]) -> Path:
    """Return the deepest folder that holds all runs; relative if it is below the current one."""
    parent = Path(os.path.commonpath([run.folder.absolute().parent for run in runs]))
    return parent.relative_to(Path.cwd()) if parent.is_relative_to(Path.cwd()) else parent


def gathered(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return lists of the items that have the same key, in the order of their first items."""
    items_of_key: dict[Key, list[Item]] = {}
    for item in items:
        items_of_key.setdefault(key(item), []).append(item)
    return items_of_key


def runs_of(groups: Iterable[Group]) -> list[Run]:
    """Return the runs of all groups."""
    return [run for group in groups for run in group.runs]


def synthetic_note(groups: Iterable[Group]) -> str:
    """Return what to put at the end of a title: says so if a run used synthetic data."""
    # A note is empty or always the same.
    return max((run.note for run in runs_of(groups)), default="")


def usual_metric(groups: Iterable[Group]) -> str:
    """Return the metric that most runs show first, without `global/` or `personal/`."""
    names = [base_name(primary_metric(run)) for run in runs_of(groups)]
    return Counter(names).most_common(1)[0][0]


def final_text(group: Group, column: str, *, std: bool = False) -> str:
    """Return the mean of the last values in a column as text.

    With several runs it has half of the 95 % t interval. It says of how many seeds it is the mean,
    if the value of a run is missing or not finite.

    Args:
        group: The runs.
        column: The column of metrics.csv.
        std: Whether to show the sample deviation over the seeds instead of the interval.
    """
    values = [run.final(column) for run in group.runs if run.has(column)]
    finite_values = _number_of_finite(values)
    if finite_values == 0:
        return text.metric_text(column, max(values, default=math.nan))

    mean, spread = mean_and_std(values) if std else group.score(column)
    cell = text.metric_text(column, mean, spread)
    if finite_values < len(group.runs):
        cell += f", {finite_values} of {len(group.runs)} seeds"
    return cell


def _number_of_finite(values: Iterable[float]) -> int:
    return sum(map(math.isfinite, values))


def interval_head(rows: Iterable[Group], *, std: bool = False) -> str:
    """Return the end of a column's head, which says what follows the sign +- in its cells.

    It is empty if every row is one run.
    """
    if all(len(row.runs) == 1 for row in rows):
        return ""
    return " (std over seeds)" if std else " (95 % interval)"


def best_of(scores: Mapping[Item, float], metric: str) -> Item:
    """Return the key of the best score of a metric; there must be one."""
    return max(scores, key=lambda item: text.direction(metric) * scores[item])


def reached_by_all(runs: Iterable[Run], column: str) -> float:
    """Return the value of a column that all runs reach: the worst of their best values.

    Runs without the column do not count. It is NaN if no run has it.
    """
    best_values = [run.best(column)[0] for run in runs]
    finite_values = [value for value in best_values if math.isfinite(value)]
    return min(finite_values, key=lambda value: text.direction(column) * value, default=math.nan)


def cost_to(target: float, run: Run, column: str) -> dict[str, float]:
    """Return what a run spent until a column first reached a value; NaN if it did not.

    Args:
        target: The value.
        run: The run.
        column: The column of metrics.csv.

    Returns:
        Rounds, bytes, FLOPs and joules of all clients, and wall-clock and virtual seconds, by name.
    """
    spent_by_round = {
        "rounds": run.rounds.index.to_series(),
        "bytes": traffic(run),
        "FLOPs": run.series("flops").fillna(0.0).cumsum(),
        "seconds": run.series("seconds").fillna(0.0).cumsum(),
        TIME: run.series(TIME),
        ENERGY: run.series(ENERGY).cumsum(),
    }
    has_reached = text.direction(column) * (run.series(column) - target) >= 0
    if not has_reached.any():
        return dict.fromkeys(spent_by_round, math.nan)
    return {name: spent[has_reached].iloc[0] for name, spent in spent_by_round.items()}
