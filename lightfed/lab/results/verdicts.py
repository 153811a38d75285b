"""How two experiments differ, seed by seed: a table of metrics and costs, and the answer in a line.

Two experiments are compared over the seeds that both have, and only if they agree in their terms:
the data, the clients, and what is tested (`keys.terms`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from lightfed.lab.results import text
from lightfed.lab.results.groups import Group, cost_to, short_names
from lightfed.lab.results.holm import ERROR
from lightfed.lab.results.paired import Difference, Verdict, mean_and_std
from lightfed.lab.results.run import ENERGY, TIME, Run, totals
from lightfed.utils.keys import flat, key_of

if TYPE_CHECKING:
    from pandas import DataFrame

_COSTS: dict[str, Callable[[float], str]] = {
    "rounds": text.count_text,
    "bytes": text.bytes_text,
    "FLOPs": text.flops_text,
    "seconds": text.seconds_text,
    TIME: text.seconds_text,
    ENERGY: text.joules_text,
}

# The end of the name of a cost that is counted until a target is reached.
UNTIL = " to target"

# A column of metrics.csv, and the value to reach.
Target = tuple[str, float]

# The number of seeds that a line about a single seed speaks of.
ENOUGH = 5

# A sentence names at most so many experiments.
MOST_NAMED = 12


class Row(NamedTuple):
    """A metric or a cost of two methods.

    Attributes:
        name: A column of metrics.csv, or a cost.
        a: The finite values of the first method, by seed.
        b: The finite values of the other method, by seed.
        seeds: The number of compared seeds.
        goal: The target in words, if this is a cost until it is reached.
    """

    name: str
    a: Mapping[int, float]
    b: Mapping[int, float]
    seeds: int
    goal: str = ""

    @property
    def difference(self) -> Difference:
        """The difference of B and A, over the seeds that have both values."""
        return Difference.of(self.b, self.a)

    @property
    def whole(self) -> bool:
        """Whether every seed has both values; otherwise there is no difference to state."""
        return len(self.difference.seeds) == self.seeds

    def mean(self, of: Mapping[int, float]) -> float:
        """Return the mean of values by seed, over all seeds.

        It is NaN if a seed has no value: a mean of the others would be of other runs.
        """
        if len(of) < self.seeds:
            return math.nan
        mean, _ = mean_and_std(list(of.values()))
        return mean

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text: the name, both means, and the difference with its interval."""
        title = text.readable(self.name)
        if self.goal:
            title = f"{text.readable(self.name.removesuffix(UNTIL))} to {self.goal}"
        if not self.whole:
            return title, self._text(self.a), self._text(self.b), text.NOTHING

        difference = self.difference
        cell = _signed(self.name, difference.mean)
        if math.isfinite(difference.std):
            low = _signed(self.name, difference.low)
            high = _signed(self.name, difference.high)
            cell += f" ({low} to {high})"
        return title, self._text(self.a), self._text(self.b), cell

    def _text(self, of: Mapping[int, float]) -> str:
        """Return the mean of values by seed as text, or how many seeds have one."""
        if len(of) == self.seeds:
            return value_text(self.name, self.mean(of))
        if self.goal:
            return f"reached by {len(of)} of {self.seeds}"
        if not of and self.name in _COSTS:
            return text.NOTHING  # such as virtual time without devices
        return f"finite in {len(of)} of {text.counted(self.seeds, 'seed')}"

    @property
    def values(self) -> dict[str, Any]:
        """The row as numbers; None where one is unknown.

        For a cost until a target is reached, it also has the number of seeds that reached it.
        """
        difference = self.difference
        if not self.whole:
            difference = Difference(seeds=(), mean=math.nan, std=math.nan)
        values = {
            "a": self.mean(self.a),
            "b": self.mean(self.b),
            "difference": difference.mean,
            "low": difference.low,
            "high": difference.high,
        }

        numbers: dict[str, Any] = {}
        for name, value in values.items():
            numbers[name] = value if math.isfinite(value) else None
        if self.goal:
            numbers["reached"] = {"a": len(self.a), "b": len(self.b), "of": self.seeds}
        return numbers


def goal_of(target: Target) -> str:
    """Return a target in words, such as `90.00 % personal accuracy`."""
    column, value = target
    return text.goal_text(column, value)


def value_text(name: str, value: float) -> str:
    """Return a metric or a cost with its unit."""
    cost_text = _COSTS.get(name.removesuffix(UNTIL))
    return text.metric_text(name, value) if cost_text is None else cost_text(value)


def _signed(name: str, value: float) -> str:
    """Return a difference of a metric or of a cost with its sign."""
    cost_text = _COSTS.get(name.removesuffix(UNTIL))
    if cost_text is None:
        return text.signed(name, value)

    sign = ""
    if value < 0:
        sign = "-"
    elif value >= 0:  # not NaN
        sign = "+"
    return f"{sign}{cost_text(abs(value))}"


def rows_of(a: Group, b: Group, target: Target | None = None) -> list[Row]:
    """Return the rows of a comparison of two experiments.

    They are the metrics that all runs have, those of the worst tenth of the clients, and the costs.

    Args:
        a: The experiment that is compared with.
        b: The other one, with runs of the same seeds.
        target: The column and the value until which costs are counted as well.
    """
    runs = [*a.runs, *b.runs]
    rows = []

    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    for metric in [*metrics, "train_loss"]:
        for column in (metric, f"{metric}_worst10"):
            if all(run.has(column) for run in runs):
                rows.append(_row(column, a, b, {run: run.final(column) for run in runs}))

    costs = {run: costs_of(run) for run in runs}
    for name in costs[runs[0]]:
        rows.append(_row(name, a, b, {run: costs[run][name] for run in runs}))
    rows = [row for row in rows if row.a or row.b]

    if target is not None:
        column, value = target
        costs_to_target = {run: cost_to(value, run, column) for run in runs}
        for name in costs_to_target[runs[0]]:
            values = {run: costs_to_target[run][name] for run in runs}
            row = _row(name + UNTIL, a, b, values, goal=goal_of(target))
            # A cost that no run knows, such as virtual time without devices, has no row. Rounds
            # always have one, because it says who reached the target.
            if row.a or row.b or name == "rounds":
                rows.append(row)
    return rows


def costs_of(run: Run) -> dict[str, float]:
    """Return the costs of a run by name; NaN where one is unknown.

    They are bytes, FLOPs and joules of all clients, and wall-clock and virtual seconds.
    """
    total = totals(run)
    return {
        "bytes": total["sent"],
        "FLOPs": total["flops"],
        "seconds": total["seconds"],
        TIME: run.final(TIME),
        ENERGY: total[ENERGY],
    }


def finals_of(group: Group, name: str, target: Target | None = None) -> dict[int, float]:
    """Return by seed the last value of a column, or a cost until a target is reached.

    Args:
        group: The runs.
        name: The column, or the cost with the ending `UNTIL`.
        target: The target of the cost. A run that did not reach it has NaN.
    """
    is_cost_to_target = target is not None and name.endswith(UNTIL)
    if not is_cost_to_target:
        return group.finals(name)

    assert target is not None
    column, value = target
    cost = name.removesuffix(UNTIL)
    return {run.seed or 0: cost_to(value, run, column)[cost] for run in group.runs}


def answer_of(
    a: Group, b: Group, metric: str, target: Target | None = None, *, p: float | None = None
) -> tuple[Difference, Verdict]:
    """Return the difference of B and A, and the verdict on it.

    No difference is shown if a seed has no finite value.

    Args:
        a: The experiment that is compared with.
        b: The other one, with runs of the same seeds.
        metric: The column, or a cost with the ending `UNTIL`.
        target: The target of that cost.
        p: The p value after the correction for other claims, if there are any. No difference is
            shown if it exceeds `ERROR`.
    """
    difference = Difference.of(finals_of(b, metric, target), finals_of(a, metric, target))
    if len(difference.seeds) < len(a.runs):
        return difference, "not shown"
    if difference.is_nothing and are_identical(a, b):
        return difference, "identical runs"
    if p is not None and p > ERROR:
        return difference, "not shown"
    return difference, difference.verdict(direction_of(metric))


def p_of(a: Group, b: Group, metric: str, target: Target | None = None) -> float:
    """Return the p value of a claim about B and A by itself; NaN if a seed has no finite value.

    The arguments are those of `answer_of`.
    """
    difference = Difference.of(finals_of(b, metric, target), finals_of(a, metric, target))
    return difference.p if len(difference.seeds) == len(a.runs) else math.nan


def are_identical(a: Group, b: Group) -> bool:
    """Return whether the runs of every seed have the same metrics in every round.

    Such a pair says nothing about its methods: what was changed had no effect.
    """
    runs_of_a = {run.seed: run for run in a.runs}
    for run in b.runs:
        other = runs_of_a.get(run.seed)
        if other is None:
            return False
        columns = [*run.metrics, "train_loss"]
        if set(columns) != {*other.metrics, "train_loss"}:
            return False
        own_values = run.rounds.reindex(columns=columns)
        if not own_values.equals(other.rounds.reindex(columns=columns)):
            return False
    return True


def direction_of(metric: str) -> int:
    """Return 1 if a higher value is better, and -1 if a lower one is; costs should be low."""
    return -1 if metric.endswith(UNTIL) else text.direction(metric)


def verdict(a: Group, b: Group, metric: str, *, p: float | None = None) -> str:
    """Return the answer to whether B is better than A in one line.

    Args:
        a: The experiment that is compared with.
        b: The other one, with runs of the same seeds.
        metric: The column.
        p: The p value after the correction for other claims, if there are any.
    """
    difference, answer = answer_of(a, b, metric, p=p)
    if answer == "identical runs":
        return _identical_text(a, b)

    line = f"no difference between {b.name} and {a.name} is shown"
    if answer != "not shown":
        line = f"{b.name} is {answer} than {a.name}"
    line += f": {text.readable(metric)} {gain_text(difference, metric)}"

    missing = len(a.runs) - len(difference.seeds)
    if missing > 0:
        line += f", {text.counted(missing, 'seed')} without a finite value"
    if p is not None:
        line += f", corrected p {p_text(p)}"
    if answer == "not shown" and missing == 0:
        line += f"; {excluded_text(difference, metric)}"
    return line + _seeds_text(difference)


def _identical_text(a: Group, b: Group) -> str:
    """Return what is said of a pair whose runs are the same."""
    seeds = [run.seed or 0 for run in a.runs]
    count = f"{text.counted(len(seeds), 'seed')} ({text.seeds_text(seeds)})"
    return (
        f"identical runs: {b.name} and {a.name} have the same metrics in every round, {count}; "
        "what differs between their configurations had no effect"
    )


def excluded_text(difference: Difference, metric: str, *, half: float | None = None) -> str:
    """Return which differences the interval excludes, such as `a gain above 1.30 points ...`.

    Args:
        difference: The difference.
        metric: Its column, or a cost with the ending `UNTIL`.
        half: Half of another interval than its own.
    """
    if difference.is_nothing:
        return "the value is the same in every seed"

    gain, loss = difference.excluded(direction_of(metric), half=half)
    parts = []
    # "Loss" would be understood as the metric of that name.
    for name, size in (("a gain", gain), ("a deterioration", loss)):
        if size is not None:
            parts.append(f"{name} above {_size_text(metric, size)}")
    if not parts:
        return "nothing is excluded"
    verb = "is" if len(parts) == 1 else "are"
    return f"{' and '.join(parts)} {verb} excluded (95 %)"


def _size_text(metric: str, size: float) -> str:
    """Return the size of a difference with its unit, without a sign."""
    return _signed(metric, abs(size)).removeprefix("+") + _points(metric)


def p_text(p: float) -> str:
    """Return a p value as text, such as `0.012` or `below 0.001`."""
    if math.isnan(p):
        return text.NOTHING
    return "below 0.001" if p < 0.001 else f"{p:.3f}"


def _seeds_text(difference: Difference) -> str:
    """Return how many seeds detect a difference of this size; empty if that is unknown."""
    needed = difference.seeds_needed()
    if needed is None:
        return ""
    if needed <= len(difference.seeds):
        return f"; {needed} seeds are enough to detect a difference of this size"
    return f"; about {needed} seeds would be needed to detect a difference of this size"


def one_seed(a: Group, b: Group, metric: str) -> str:
    """Return what can be said of two experiments with a single seed in common, in one line.

    It is no verdict, but a size. One difference has no spread. So the line says how large the
    spread can be for a few seeds to detect a difference of this size.
    """
    difference = Difference.of(b.finals(metric), a.finals(metric))
    if difference.is_nothing and are_identical(a, b):
        return _identical_text(a, b)
    if not difference.seeds:
        return f"no verdict from one seed: {text.readable(metric)} is not finite in it"

    gain = f"{_signed(metric, difference.mean)}{_points(metric)} {text.readable(metric)}"
    line = f"no verdict from one seed: {b.name} - {a.name} is {gain} in seed {difference.seeds[0]}"
    if difference.mean == 0:
        return f"{line}; an interval needs two seeds or more of each"

    largest = difference.spread_detected(ENOUGH)
    spread = f"{100 * largest:.2f} points" if text.is_share(metric) else f"{largest:.2g}"
    return (
        f"{line}; {ENOUGH} seeds would be needed to detect a difference of this size"
        f" if its standard deviation over seeds is {spread}, and more if it is larger"
    )


def _points(metric: str) -> str:
    """Return the unit of a difference of shares."""
    return " points" if text.is_share(metric) else ""


def gain_text(difference: Difference, metric: str, *, half: float | None = None) -> str:
    """Return a difference as text: `+1.20 points (+0.40 to +2.00), 5 seeds (0-4)`.

    Args:
        difference: The difference.
        metric: Its column, or a cost with the ending `UNTIL`.
        half: Half of another interval than its own.
    """
    if not difference.seeds:
        return "no seed has both values"
    half = difference.half if half is None else half
    mean = _signed(metric, difference.mean)
    low = _signed(metric, difference.mean - half)
    high = _signed(metric, difference.mean + half)
    seeds = f"{text.counted(len(difference.seeds), 'seed')} ({text.seeds_text(difference.seeds)})"
    return f"{mean}{_points(metric)} ({low} to {high}), {seeds}"


def _row(name: str, a: Group, b: Group, values: Mapping[Run, float], *, goal: str = "") -> Row:
    """Return the row of some values of the runs of two experiments."""

    def finite_values(group: Group) -> dict[int, float]:
        return {run.seed or 0: values[run] for run in group.runs if math.isfinite(values[run])}

    return Row(name, finite_values(a), finite_values(b), seeds=len(a.runs), goal=goal)


def difference_table(rows: Sequence[Row], names: tuple[str, str]) -> DataFrame:
    """Return the rows as a table of text, under the names of the two experiments.

    Args:
        rows: The metrics and costs.
        names: The names of A and B in the heads of the columns.
    """
    from pandas import DataFrame

    name_a, name_b = names
    # Between settings, such as `lr 0.1`, a minus sign would read as part of a number.
    both_are_words = name_a.isidentifier() and name_b.isidentifier()
    difference = f"{name_b} - {name_a}" if both_are_words else "second - first"
    heads = ["metric", name_a, name_b, f"{difference} (95 % paired t interval)"]
    return DataFrame([row.cells for row in rows], columns=heads, dtype="str")


def paired(a: Group, b: Group) -> tuple[Group, Group]:
    """Return both with the finished runs of the seeds that they share, named by their labels."""
    runs_of_a = {run.seed: run for run in a.runs if run.finished}
    runs_of_b = {run.seed: run for run in b.runs if run.finished}
    seeds = sorted(seed for seed in runs_of_a.keys() & runs_of_b.keys() if seed is not None)
    return (
        replace(a, name=a.label, runs=tuple(runs_of_a[seed] for seed in seeds)),
        replace(b, name=b.label, runs=tuple(runs_of_b[seed] for seed in seeds)),
    )


class Pairs(NamedTuple):
    """Which experiments can be compared with each other.

    Attributes:
        pairs: The first experiment of each set on equal terms, with each of the others. Their names
            are what differs between them.
        differ: The permitted differences of these pairs, in words.
        alone: Why the other experiments have no verdict, in words.
    """

    pairs: list[tuple[Group, Group]]
    differ: list[str]
    alone: list[str]


def pairs_of(groups: Sequence[Group], differ: Sequence[str] = ()) -> Pairs:
    """Return the pairs of experiments on equal terms; see `paired`.

    Args:
        groups: The experiments.
        differ: Keys in which they may differ, though they decide what is measured.
    """
    terms = {group: terms_of(group.runs[0]) for group in groups}

    # Sets of experiments on equal terms.
    sets: list[list[Group]] = []
    for group in groups:
        for members in sets:
            if not refused(unequal(terms[members[0]], terms[group]), differ):
                members.append(group)
                break
        else:
            sets.append([group])

    pairs = []
    names = []
    permitted = []
    for first, *others in sets:
        for other in others:
            pairs.append(paired(first, other))
            names.append(short_names(first, other))
            for key, mine, theirs in unequal(terms[first], terms[other]):
                permitted.append(
                    f"{key} differs: {mine} for {first.label}, {theirs} for {other.label}"
                )

    alone = _lines_about_alone(groups[0], sets, terms, differ)
    if len(groups) == 1:
        alone.append("no verdict: all runs are of one experiment")
    return Pairs(_named(pairs, names), permitted, alone)


def _named(
    pairs: Sequence[tuple[Group, Group]], names: Sequence[tuple[str, str]]
) -> list[tuple[Group, Group]]:
    """Return pairs named by what differs between the two, where no other pair has these names.

    Otherwise they keep their labels.

    Args:
        pairs: The pairs, named by their labels.
        names: For each pair, what differs between the two.
    """
    # Pairs on different data may have the same names, because the data are said beside them.
    keys = [(a.condition, *short) for (a, _), short in zip(pairs, names, strict=True)]
    times = Counter(keys)

    named = []
    for (a, b), key, (name_a, name_b) in zip(pairs, keys, names, strict=True):
        if times[key] == 1:
            named.append((replace(a, name=name_a), replace(b, name=name_b)))
        else:
            named.append((a, b))
    return named


def _lines_about_alone(
    first: Group,
    sets: Sequence[Sequence[Group]],
    terms: Mapping[Group, Mapping[str, str]],
    differ: Sequence[str],
) -> list[str]:
    """Return lines that say why experiments without a partner have no verdict.

    Args:
        first: The first experiment.
        sets: The sets of experiments on equal terms.
        terms: The terms of each experiment.
        differ: Keys in which experiments may differ.
    """
    alone = [members[0] for members in sets if len(members) == 1]

    # They are held against the first experiment. If that is the only one without a partner, it is
    # held against the next set.
    base = first
    if alone == [first] and len(sets) > 1:
        base = sets[1][0]

    labels_of_key: dict[str, list[str]] = {}
    detail_of_key: dict[str, str] = {}
    for group in alone:
        if group == base:
            continue
        key, value_of_base, value = refused(unequal(terms[base], terms[group]), differ)[0]
        labels_of_key.setdefault(key, []).append(group.label)
        detail_of_key[key] = f"{value_of_base} for {base.label}, {value} for {group.label}"

    lines = []
    for key, labels in labels_of_key.items():
        names = ", ".join(labels) if len(labels) <= MOST_NAMED else f"{len(labels)} experiments"
        detail = detail_of_key[key] if len(labels) == 1 else f"not that of {base.label}"
        lines.append(f"no verdict for {names}: {key} is {detail}; --differ {key} permits it")
    return lines


def answer_line(a: Group, b: Group, metric: str, *, p: float | None = None) -> str:
    """Return what the shared seeds of a pair say about a metric, in one line.

    The arguments are those of `verdict`.
    """
    if not a.runs:
        return f"no verdict for {b.name} and {a.name}: no finished runs with the same seed"
    if len(a.runs) == 1:
        return one_seed(a, b, metric)
    return verdict(a, b, metric, p=p)


def terms_of(run: Run) -> dict[str, str]:
    """Return the values in which a run must agree with another to be compared with it.

    They are read from config.yaml, and without it from what environment.json says.

    Returns:
        The values as text, by their dotted keys.
    """
    values: dict[str, Any] = dict(run.settings)
    with suppress(yaml.YAMLError):
        config = yaml.load(run.config, Loader=yaml.BaseLoader)
        if isinstance(config, dict):
            values |= dict(flat(config))

    terms = {}
    for key, value in values.items():
        is_term = key_of(key).term and key_of(key).role != "how"
        if is_term and value not in ("null", ""):
            terms[key] = str(value)

    # If the configuration names no moment of tests, it is that of the algorithm.
    moment = run.environment.get("evaluate_at")
    if moment:
        terms["model.evaluate_at"] = str(moment)

    if not any(key.startswith("data.dataset") for key in terms):
        terms["data.dataset"] = run.data
    terms["clients"] = str(run.num_clients)
    return terms


def unequal(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the key, the own and the other value of all terms that are not the same."""
    differences = []
    for key in sorted(own.keys() | theirs.keys()):
        own_value = own.get(key, "not set")
        other_value = theirs.get(key, "not set")
        if own_value != other_value:
            differences.append((key, own_value, other_value))
    return differences


def refused(
    differences: Sequence[tuple[str, Any, Any]], differ: Sequence[str]
) -> list[tuple[str, Any, Any]]:
    """Return the differences that are not permitted.

    Args:
        differences: Keys and values, as `unequal` returns them.
        differ: The permitted keys. A key also permits all keys below it.
    """

    def is_permitted(key: str) -> bool:
        return any(f"{key}.".startswith(f"{permitted}.") for permitted in differ)

    return [difference for difference in differences if not is_permitted(difference[0])]
