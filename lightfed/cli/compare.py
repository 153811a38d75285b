"""`lightfed compare`: is B better than A, by how much, and at what cost?

The answer is about one metric, chosen before the runs or the same for all; the other rows of the
table have their intervals, each by itself.
"""

import argparse
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pandas import DataFrame

from lightfed.cli.contest import Grid, Held, Method, Way, hold
from lightfed.cli.shipped import with_paths
from lightfed.cli.sweep import add_execution
from lightfed.drawing.summary import new_console, print_line, print_table
from lightfed.report.comparison import write_page
from lightfed.report.figures import comparison_figures
from lightfed.results import text
from lightfed.results.groups import Group, common_parent, cost_to
from lightfed.results.paired import Difference, Verdict, mean_and_std
from lightfed.results.run import TIME, Run, totals
from lightfed.utils.errors import OneLineParser, require

_COSTS: dict[str, Callable[[float], str]] = {
    "rounds": text.count_text,
    "bytes": text.bytes_text,
    "FLOPs": text.flops_text,
    "seconds": text.seconds_text,
    TIME: text.seconds_text,
}
UNTIL = " to target"
Target = tuple[str, float]  # a column of metrics.csv and the value to reach
_HEADS = ("metric", "A", "B", "B - A (95 % paired t interval)")


class Row(NamedTuple):
    """A metric or a cost of both methods.

    Attributes:
        name: a column of metrics.csv, or a cost.
        a, b: means over the seeds; NaN if unknown.
        difference: of B and A.
    """

    name: str
    a: float
    b: float
    difference: Difference

    @property
    def cells(self) -> tuple[str, ...]:
        """As text: the name, both means, and the difference with its interval."""
        found = self.difference
        a, b = (value_text(self.name, value) for value in (self.a, self.b))
        mean, low, high = (_signed(self.name, end) for end in (found.mean, found.low, found.high))
        interval = f" ({low} to {high})" if math.isfinite(found.std) else ""
        return text.readable(self.name), a, b, mean + interval

    @property
    def values(self) -> dict[str, float | None]:
        """As numbers; None where one is unknown."""
        found = self.difference
        ends = {"difference": found.mean, "low": found.low, "high": found.high}
        both = {"a": self.a, "b": self.b, **ends}
        return {key: value if math.isfinite(value) else None for key, value in both.items()}


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed compare`."""
    asked = _parser().parse_args(argv)
    methods = [
        Method(name, ("fit", "--config", *with_paths([file]), *_sets([*asked.set, *own])))
        for name, file, own in (("A", asked.a, asked.set_a), ("B", asked.b, asked.set_b))
    ]
    target, grid = _target(asked.target), grid_of(asked.tune, asked.tune_seed)
    metric = asked.metric or (target[0] if target else None)
    way = Way(asked.jobs, asked.slurm)
    held = hold(methods, asked.seeds, way, grid=grid, metric=metric, differ=asked.differ)
    a, b = held.groups
    rows = rows_of(a, b, target)
    if asked.json:
        print(json.dumps(_numbers(held, rows, methods), indent=1))
        return 0
    table = DataFrame([row.cells for row in rows], columns=_HEADS, dtype="str")
    said = [f"{method.name}: lightfed {shlex.join(method.words)}" for method in methods]
    said += [*held.differ, *searched(held, grid)]
    show("compare", held, table, said, [verdict(a, b, held.metric)])
    return 0


def show(
    folder: str, held: Held, table: DataFrame, said: Sequence[str], answers: Sequence[str]
) -> None:
    """Print a table and answers, and write them to a page in a folder beside the runs."""
    console = new_console()
    for line in said:
        print_line(console, line)
    for shown in filter(len, (held.search, table)):
        print_table(console, shown)
    for line in answers:
        print_line(console, line)
    runs = [run for group in held.groups for run in group.runs]
    place = common_parent(runs) / folder
    figures = comparison_figures(held.groups, held.metric)
    search = held.search if len(held.search) else None
    said, name = [*answers, *said], f"{folder}: {held.metric}"
    page = write_page(place, name, table, said, figures, search=search)
    print_line(console, f"page: {page}")


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
    if target is not None:
        column, value = target
        for run, spent in costs.items():
            spent |= {n + UNTIL: cost for n, cost in cost_to(value, run, column).items()}
    for name in costs[runs[0]]:
        rows.append(_row(name, a, b, {run: spent[name] for run, spent in costs.items()}))
    return [row for row in rows if row.difference.seeds]


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
    said = "no difference is shown" if answer == "not shown" else f"B is {answer} than A"
    lacks = len(a.runs) - len(found.seeds)
    without = f", {text.counted(lacks, 'seed')} without a finite value" if lacks else ""
    needed = found.seeds_needed()
    needs = f"; {needed} seeds show a difference of this size" if needed else ""
    return f"{said}: {text.readable(metric)} {gain_text(found, metric)}{without}{needs}"


def gain_text(found: Difference, metric: str) -> str:
    """`+1.20 points (+0.40 to +2.00), 5 seeds (0-4)`."""
    if not found.seeds:
        return "no seed has both values"
    gain, low, high = (_signed(metric, end) for end in (found.mean, found.low, found.high))
    unit = " points" if text.is_share(metric) else ""
    seeds = f"{text.counted(len(found.seeds), 'seed')} ({text.seeds_text(found.seeds)})"
    return f"{gain}{unit} ({low} to {high}), {seeds}"


def searched(held: Held, grid: Grid | None) -> list[str]:
    """How rates were searched, in words; nothing without a search."""
    if grid is None:
        return []
    keys, listed = " and ".join(grid.values), text.seeds_text(grid.seeds)
    named = f"seed{'s' * (len(grid.seeds) > 1)} {listed}"
    return [f"{keys}: the same values for each method, on {named}, by {held.metric}"]


def _row(name: str, a: Group, b: Group, values: Mapping[Run, float]) -> Row:
    own = [{run.seed or 0: values[run] for run in group.runs} for group in (a, b)]
    mean_a, mean_b = (mean_and_std([*by_seed.values()])[0] for by_seed in own)
    return Row(name, mean_a, mean_b, Difference.of(own[1], own[0]))


def _numbers(held: Held, rows: Sequence[Row], methods: Sequence[Method]) -> dict[str, Any]:
    """The comparison for a program."""
    a, b = held.groups
    found, answer = answer_of(a, b, held.metric)
    return {
        "a": shlex.join(methods[0].words),
        "b": shlex.join(methods[1].words),
        "seeds": [run.seed for run in a.runs],
        "metric": held.metric,
        "verdict": answer,
        "seeds_needed": found.seeds_needed(),
        "rows": {row.name: row.values for row in rows},
        "differ": held.differ,
        "search": held.search.to_dict("records"),
        "commit": a.runs[0].environment.get("commit"),
    }


def _sets(given: Sequence[str]) -> list[str]:
    """`key=value` as words of a command."""
    for word in given:
        key, sign, _ = word.partition("=")
        require(bool(key and sign), "--set", word, "give key=value, such as model.fraction=0.5")
        fix = "give --seeds, which both methods share"
        require(key != "model.seed", key, "not the same for both methods", fix)
    return [f"--{word}" for word in given]


def _target(given: str | None) -> Target | None:
    """The column and the value of `metric>=x` or `metric<=x`."""
    found = re.fullmatch(r"([^<>=]+)([<>])=([-+.e\d]*\d)", given or "")
    good = found is not None and (found[2] == ">") == (text.direction(found[1]) > 0)
    fix = "give metric>=x, such as personal/accuracy>=0.9, or <= if low is good"
    require(given is None or good, "--target", given, fix)
    return None if found is None else (found[1], float(found[3]))


def grid_of(given: Sequence[str], on: Sequence[int]) -> Grid | None:
    """The grid of `key=value,value` words; None without any."""
    values = {}
    for word in given:
        key, _, listed = word.partition("=")
        values[key] = [value for value in listed.split(",") if value]
        require(len(values[key]) > 1, "--tune", word, "give two or more values: key=.01,.03,.1")
    return Grid(values, on) if values else None


def seed_list(words: str) -> list[int]:
    """Seeds of `100`, `0-4` or `0,2,7-9`, as an argument."""
    found: list[int] = []
    for part in words.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if ends is None:
            raise argparse.ArgumentTypeError(f"{words!r} is not like 0-4 or 0,2,7-9")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return [*dict.fromkeys(found)]


def seeds(words: str) -> list[int]:
    """Two or more of them."""
    found = seed_list(words)
    if len(found) < 2:
        raise argparse.ArgumentTypeError(f"{words!r} has fewer than two seeds: no interval")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "lightfed compare",
        allow_abbrev=False,
        description="Run what is missing of two methods, and say which is better, at what cost.",
    )
    add = parser.add_argument
    add("a", metavar="A.yaml", help="the configuration that is compared with")
    add("b", metavar="B.yaml", help="the one that may be better; the same file with other --set-b")
    for flag, of in (("--set", "both"), ("--set-a", "A"), ("--set-b", "B")):
        about = f"a value for {of}"
        add(flag, action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=about)
    add("--seeds", type=seeds, default=seeds("0-4"), help="of the runs (default: 0-4)")
    add("--metric", metavar="COLUMN", help="of the answer (default: the first of metrics.csv)")
    goal = "compare the costs until this was first measured, such as personal/accuracy>=0.9"
    add("--target", metavar="METRIC>=X", help=goal)
    alike = "values to search for each method alike, such as model.optimizer.lr=.01,.03,.1"
    add("--tune", action="extend", nargs="+", default=[], metavar="KEY=X,Y", help=alike)
    of_search = "of the search: one, or several such as 100-102 (default: 100)"
    add("--tune-seed", type=seed_list, default=[100], metavar="SEEDS", help=of_search)
    permitted = "a key in which A and B may differ, though it decides what is measured"
    add("--differ", action="extend", nargs="+", default=[], metavar="KEY", help=permitted)
    add("--json", action="store_true", help="print the comparison for a program")
    add_execution(parser)
    return parser
