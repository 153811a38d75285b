"""How two experiments differ, seed by seed: a table of metrics and costs, and the answer in a line.

Two experiments are compared over the seeds that both have, and only if they agree in their terms:
the data, the clients, and what is tested (`keys.terms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from lightfed.lab.results import text
from lightfed.lab.results.groups import Group, cost_to
from lightfed.lab.results.paired import Difference, Verdict, mean_and_std
from lightfed.lab.results.run import TIME, Run, totals
from lightfed.utils.keys import flat, key_of

if TYPE_CHECKING:
    from pandas import DataFrame

_COSTS: dict[str, Callable[[float], str]] = {
    "rounds": text.count_text,
    "bytes": text.bytes_text,
    "FLOPs": text.flops_text,
    "seconds": text.seconds_text,
    TIME: text.seconds_text,
}
UNTIL = " to target"
Target = tuple[str, float]  # a column of metrics.csv and the value to reach
ENOUGH = 5  # seeds of which a line about a single seed speaks
MOST_NAMED = 12  # experiments in a sentence


class Row(NamedTuple):
    """A metric or a cost of both methods.

    Attributes:
        name: a column of metrics.csv, or a cost.
        a, b: the finite values by seed.
        seeds: number of compared seeds.
        goal: the target in words, if this is a cost to it.
    """

    name: str
    a: Mapping[int, float]
    b: Mapping[int, float]
    seeds: int
    goal: str = ""

    @property
    def difference(self) -> Difference:
        """Of B and A, over the seeds that have both."""
        return Difference.of(self.b, self.a)

    @property
    def whole(self) -> bool:
        """Whether every seed has both values: otherwise there is no difference to state."""
        return len(self.difference.seeds) == self.seeds

    def mean(self, of: Mapping[int, float]) -> float:
        """Over all seeds; NaN if one has no value, because a mean of the others is another one."""
        return mean_and_std([*of.values()])[0] if len(of) == self.seeds else math.nan

    @property
    def cells(self) -> tuple[str, ...]:
        """As text: the name, both means, and the difference with its interval."""
        title = text.readable(self.name)
        if self.goal:
            title = f"{self.name.removesuffix(UNTIL)} to {self.goal}"
        if not self.whole:
            return title, self._text(self.a), self._text(self.b), text.NOTHING

        found = self.difference
        mean, low, high = (_signed(self.name, end) for end in (found.mean, found.low, found.high))
        interval = f" ({low} to {high})" if math.isfinite(found.std) else ""
        return title, self._text(self.a), self._text(self.b), mean + interval

    def _text(self, of: Mapping[int, float]) -> str:
        if len(of) == self.seeds:
            return value_text(self.name, self.mean(of))
        if self.goal:
            return f"reached by {len(of)} of {self.seeds}"
        return f"finite in {len(of)} of {text.counted(self.seeds, 'seed')}"

    @property
    def values(self) -> dict[str, Any]:
        """As numbers; None where one is unknown. Of a cost to the target also who reached it."""
        found = self.difference if self.whole else Difference((), *[math.nan] * 2)
        ends = {"difference": found.mean, "low": found.low, "high": found.high}
        both = {"a": self.mean(self.a), "b": self.mean(self.b), **ends}
        numbers: dict[str, Any] = {
            key: value if math.isfinite(value) else None for key, value in both.items()
        }
        if self.goal:
            numbers["reached"] = {"a": len(self.a), "b": len(self.b), "of": self.seeds}
        return numbers


def goal_of(target: Target) -> str:
    """A target in words, such as `90.00 % personal accuracy`."""
    return text.goal_text(*target)


def value_text(name: str, value: float) -> str:
    """A metric or a cost with its unit."""
    cost = _COSTS.get(name.removesuffix(UNTIL))
    return text.metric_text(name, value) if cost is None else cost(value)


def _signed(name: str, value: float) -> str:
    cost = _COSTS.get(name.removesuffix(UNTIL))
    sign = "-" if value < 0 else "+" * (value >= 0)
    return text.signed(name, value) if cost is None else f"{sign}{cost(abs(value))}"


def rows_of(a: Group, b: Group, target: Target | None = None) -> list[Row]:
    """The metrics that all runs of both have, the worst tenth of the clients, and costs."""
    runs = [*a.runs, *b.runs]
    named = dict.fromkeys([*(name for run in runs for name in run.metrics), "train_loss"])
    columns = [column for name in named for column in (name, f"{name}_worst10")]
    known = [column for column in columns if all(run.has(column) for run in runs)]
    rows = [_row(name, a, b, {run: run.final(name) for run in runs}) for name in known]
    costs = {run: costs_of(run) for run in runs}
    for name in costs[runs[0]]:
        rows.append(_row(name, a, b, {run: spent[name] for run, spent in costs.items()}))
    rows = [row for row in rows if row.a or row.b]

    if target is not None:
        column, value = target
        until = {run: cost_to(value, run, column) for run in runs}
        # A cost that no run knows, such as virtual time without devices, is left out; rounds stay,
        # because they say who reached the target.
        for name in until[runs[0]]:
            costs_to_it = {run: spent[name] for run, spent in until.items()}
            row = _row(name + UNTIL, a, b, costs_to_it, goal=goal_of(target))
            if row.a or row.b or name == "rounds":
                rows.append(row)
    return rows


def costs_of(run: Run) -> dict[str, float]:
    """Bytes and FLOPs of all clients, wall-clock and virtual seconds; NaN where unknown."""
    spent = totals(run)
    found = {"bytes": spent["sent"], "FLOPs": spent["flops"], "seconds": spent["seconds"]}
    return found | {TIME: run.final(TIME)}


def finals_of(group: Group, name: str, target: Target | None = None) -> dict[int, float]:
    """By seed, the last value of a column, or a cost to the target; NaN if not reached."""
    cost = name.removesuffix(UNTIL)
    if target is None or cost == name:
        return group.finals(name)
    column, value = target
    return {run.seed or 0: cost_to(value, run, column)[cost] for run in group.runs}


def answer_of(
    a: Group, b: Group, metric: str, target: Target | None = None
) -> tuple[Difference, Verdict]:
    """The difference of B and A, and the answer: none where a seed has no finite value."""
    found = Difference.of(finals_of(b, metric, target), finals_of(a, metric, target))
    complete = len(found.seeds) == len(a.runs)
    up = -1 if metric.endswith(UNTIL) else text.direction(metric)
    return found, found.verdict(up) if complete else "not shown"


def verdict(a: Group, b: Group, metric: str) -> str:
    """The answer in one line."""
    found, answer = answer_of(a, b, metric)
    said = (
        "no difference is shown" if answer == "not shown" else f"{b.name} is {answer} than {a.name}"
    )
    lacks = len(a.runs) - len(found.seeds)
    without = f", {text.counted(lacks, 'seed')} without a finite value" if lacks else ""
    needs = _seeds_text(found)
    return f"{said}: {text.readable(metric)} {gain_text(found, metric)}{without}{needs}"


def _seeds_text(found: Difference) -> str:
    """How many seeds detect a difference of this size and spread; empty if that is not known."""
    needed = found.seeds_needed()
    if needed is None:
        return ""
    if needed <= len(found.seeds):
        return f"; {needed} seeds are enough to detect a difference of this size"
    return f"; about {needed} seeds would be needed to detect a difference of this size"


def one_seed(a: Group, b: Group, metric: str) -> str:
    """What can be said of two experiments with a single seed in common: no verdict, but a size.

    One difference has no spread. So the line says how large the spread may be for a few seeds to
    detect a difference of this size.
    """
    found = Difference.of(b.finals(metric), a.finals(metric))
    if not found.seeds:
        return f"no verdict from one seed: {text.readable(metric)} is not finite in it"

    gain = f"{_signed(metric, found.mean)}{_points(metric)}"
    said = f"no verdict from one seed: {b.name} - {a.name} is {gain} {text.readable(metric)}"
    said += f" in seed {found.seeds[0]}"
    if not found.mean:
        return f"{said}; an interval needs two seeds or more of each"

    most = found.spread_detected(ENOUGH)
    spread = f"{100 * most:.2f} points" if text.is_share(metric) else f"{most:.2g}"
    return (
        f"{said}; {ENOUGH} seeds would be needed to detect a difference of this size"
        f" if its standard deviation over seeds is {spread}, and more if it is larger"
    )


def _points(metric: str) -> str:
    """The unit of a difference of shares."""
    return " points" if text.is_share(metric) else ""


def gain_text(found: Difference, metric: str) -> str:
    """`+1.20 points (+0.40 to +2.00), 5 seeds (0-4)`."""
    if not found.seeds:
        return "no seed has both values"
    gain, low, high = (_signed(metric, end) for end in (found.mean, found.low, found.high))
    seeds = f"{text.counted(len(found.seeds), 'seed')} ({text.seeds_text(found.seeds)})"
    return f"{gain}{_points(metric)} ({low} to {high}), {seeds}"


def _row(name: str, a: Group, b: Group, values: Mapping[Run, float], *, goal: str = "") -> Row:
    finite_a, finite_b = (
        {run.seed or 0: values[run] for run in group.runs if math.isfinite(values[run])}
        for group in (a, b)
    )
    return Row(name, finite_a, finite_b, len(a.runs), goal)


def difference_table(rows: Sequence[Row], a: Group, b: Group) -> DataFrame:
    """The rows as text, under the names of the two experiments."""
    from pandas import DataFrame

    heads = ["metric", a.name, b.name, f"{b.name} - {a.name} (95 % paired t interval)"]
    return DataFrame([row.cells for row in rows], columns=heads, dtype="str")


def paired(a: Group, b: Group) -> tuple[Group, Group]:
    """Both with the finished runs of the seeds that they share, named by their labels."""
    of_a, of_b = ({run.seed: run for run in group.runs if run.finished} for group in (a, b))
    seeds = sorted(seed for seed in of_a.keys() & of_b.keys() if seed is not None)
    return (
        replace(a, name=a.label, runs=tuple(of_a[seed] for seed in seeds)),
        replace(b, name=b.label, runs=tuple(of_b[seed] for seed in seeds)),
    )


class Pairs(NamedTuple):
    """Which experiments can be compared with each other.

    Attributes:
        pairs: the first experiment of each set of equal terms, and each of the others.
        differ: the permitted differences of these pairs, in words.
        alone: why the other experiments have no verdict, in words.
    """

    pairs: list[tuple[Group, Group]]
    differ: list[str]
    alone: list[str]


def pairs_of(groups: Sequence[Group], differ: Sequence[str] = ()) -> Pairs:
    """Pairs of experiments on equal terms, see `paired`.

    Args:
        groups: the experiments.
        differ: keys in which they may differ, though they decide what is measured.
    """
    terms = {group: terms_of(group.runs[0]) for group in groups}
    sets: list[list[Group]] = []
    for group in groups:
        for members in sets:
            if not refused(unequal(terms[members[0]], terms[group]), differ):
                members.append(group)
                break
        else:
            sets.append([group])

    pairs = []
    permitted = []
    for first, *others in sets:
        for other in others:
            pairs.append(paired(first, other))
            for key, mine, theirs in unequal(terms[first], terms[other]):
                permitted.append(
                    f"{key} differs: {mine} for {first.label}, {theirs} for {other.label}"
                )

    # Experiments without a partner are held against the first one; that against the second set.
    lone = [members[0] for members in sets if len(members) == 1]
    base = groups[0]
    if lone == [base] and len(sets) > 1:
        base = sets[1][0]
    by_key: dict[str, list[tuple[str, str]]] = {}
    for group in lone:
        if group == base:
            continue
        key, mine, theirs = refused(unequal(terms[base], terms[group]), differ)[0]
        detail = f"{mine} for {base.label}, {theirs} for {group.label}"
        by_key.setdefault(key, []).append((group.label, detail))
    alone = []
    for key, found in by_key.items():
        labels = [label for label, _ in found]
        named = ", ".join(labels) if len(labels) <= MOST_NAMED else f"{len(labels)} experiments"
        detail = found[0][1] if len(found) == 1 else f"not that of {base.label}"
        alone.append(f"no verdict for {named}: {key} is {detail}; --differ {key} permits it")
    if len(groups) == 1:
        alone.append("no verdict: all runs are of one experiment")
    return Pairs(pairs, permitted, alone)


def answer_line(a: Group, b: Group, metric: str) -> str:
    """What the shared seeds of a pair say of a metric, in one line."""
    if not a.runs:
        return f"no verdict for {b.name} and {a.name}: no finished runs with the same seed"
    return one_seed(a, b, metric) if len(a.runs) == 1 else verdict(a, b, metric)


def terms_of(run: Run) -> dict[str, str]:
    """The values, as text, in which a run must agree with another to be compared with it.

    They are read from config.yaml, and without it from what environment.json says.
    """
    values: dict[str, Any] = dict(run.settings)
    with suppress(yaml.YAMLError):
        config = yaml.load(run.config, Loader=yaml.BaseLoader)
        values |= dict(flat(config)) if isinstance(config, dict) else {}
    found = {
        key: str(value)
        for key, value in values.items()
        if key_of(key).term and key_of(key).role != "how" and value not in ("null", "")
    }
    # An algorithm has its own moment of tests where the configuration names none.
    if moment := run.environment.get("evaluate_at"):
        found["model.evaluate_at"] = str(moment)
    if not any(key.startswith("data.dataset") for key in found):
        found["data.dataset"] = run.data
    return found | {"clients": str(run.num_clients)}


def unequal(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key, own and other value of all terms that are not the same."""
    keys = sorted(own.keys() | theirs.keys())
    both = [(key, own.get(key, "not set"), theirs.get(key, "not set")) for key in keys]
    return [(key, mine, other) for key, mine, other in both if mine != other]


def refused(
    found: Sequence[tuple[str, Any, Any]], differ: Sequence[str]
) -> list[tuple[str, Any, Any]]:
    """Those differences that are not permitted: neither their key nor one above it is named."""
    return [one for one in found if not any(f"{one[0]}.".startswith(f"{k}.") for k in differ)]
