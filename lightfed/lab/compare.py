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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from pandas import DataFrame

from lightfed.cli.shipped import with_paths
from lightfed.lab.contest import Grid, Held, Method, Way, hold
from lightfed.lab.drawing.files import FORMATS, TABLES, listed, write_files
from lightfed.lab.drawing.summary import new_console, print_line, print_table
from lightfed.lab.report.comparison import write_page
from lightfed.lab.report.figures import comparison_figures
from lightfed.lab.results import text
from lightfed.lab.results.groups import Group, common_parent, cost_to
from lightfed.lab.results.paired import Difference, Verdict, mean_and_std
from lightfed.lab.results.run import TIME, Run, totals
from lightfed.lab.sweep import add_execution
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


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed compare`."""
    asked = _parser().parse_args(argv)
    sides = [
        ("fit", "--config", *with_paths([file]), *_sets([*asked.set, *own]))
        for file, own in ((asked.a, asked.set_a), (asked.b, asked.set_b))
    ]
    methods = [
        Method(name, words)
        for name, words in zip(names_of(sides, (asked.set_a, asked.set_b)), sides, strict=True)
    ]
    target, grid = _target(asked.target), grid_of(asked.tune, asked.tune_seed)
    metric = asked.metric or (target[0] if target else None)
    way = Way(asked.jobs, asked.slurm)
    held = hold(methods, asked.seeds, way, grid=grid, metric=metric, differ=asked.differ)
    a, b = held.groups
    rows = rows_of(a, b, target)
    if asked.json:
        print(json.dumps(_numbers(held, rows, methods, target), indent=1))
        return 0
    heads = ["metric", a.name, b.name, f"{b.name} - {a.name} (95 % paired t interval)"]
    table = DataFrame([row.cells for row in rows], columns=heads, dtype="str")
    said = [f"{method.name}: lightfed {shlex.join(method.words)}" for method in methods]
    said += [*held.differ, *searched(held, grid)]
    if target is not None:
        said.append(f"target: {goal_of(target)}")
    files = Files(asked.format, asked.table)
    show("compare", held, table, said, [verdict(a, b, held.metric)], target=target, files=files)
    return 0


def names_of(sides: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Names of two methods for readers: what tells their commands apart.

    Their algorithms, or else their files, or else what is set for each alone.

    Args:
        sides: the words of their commands.
        own: the `key=value` words of each alone.
    """
    algorithms = [_algorithm(words) for words in sides]
    files = [Path(words[2]).stem for words in sides]
    folders = [Path(words[2]).parent.name for words in sides]
    sets = [", ".join(map(_last_part, words)) for words in own]

    tries = [
        algorithms,
        [f"{algorithm} ({file})" for algorithm, file in zip(algorithms, files, strict=True)],
        [f"{algorithm} ({folder})" for algorithm, folder in zip(algorithms, folders, strict=True)],
        [f"{a} ({s})" if s else a for a, s in zip(algorithms, sets, strict=True)],
    ]
    for a, b in tries:
        if a != b:
            return a, b
    return f"{algorithms[0]} A", f"{algorithms[0]} B"


def _last_part(word: str) -> str:
    """`model.local_epochs=2` -> `local_epochs=2`."""
    key, sign, value = word.partition("=")
    return key.rpartition(".")[2] + sign + value


def _algorithm(words: Sequence[str]) -> str:
    """The algorithm's class, as a command names it."""
    named = ""
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        text_of_file = Path(words[2]).read_text("utf-8")
        config = yaml.safe_load(text_of_file)
        model = config.get("model") if isinstance(config, dict) else None
        given = model.get("algorithm") if isinstance(model, dict) else None
        named = str(given.get("class_path", "") if isinstance(given, dict) else given or "")
    for word in words:
        for key in ("--model.algorithm=", "--model.algorithm.class_path="):
            if word.startswith(key) and "{" not in word:
                named = word.removeprefix(key)
    return named.rpartition(".")[2] or Path(words[2]).stem


def goal_of(target: Target) -> str:
    """A target in words, such as `90.00 % personal accuracy`."""
    return text.goal_text(*target)


class Files(NamedTuple):
    """Which files to write besides the page: formats of figures, and of tables."""

    formats: Sequence[str] = ()
    tables: Sequence[str] = ()


def show(
    folder: str,
    held: Held,
    table: DataFrame,
    said: Sequence[str],
    answers: Sequence[str],
    *,
    target: Target | None = None,
    files: Files = Files(),  # noqa: B008
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
    if target is not None:
        name += f", to {goal_of(target)}"
    page = write_page(place, name, table, said, figures, search=search)
    tables = {"comparison-table": table}
    if search is not None:
        tables["search"] = search
    write_files(figures, tables, place, *files)
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


def _row(name: str, a: Group, b: Group, values: Mapping[Run, float], *, goal: str = "") -> Row:
    finite_a, finite_b = (
        {run.seed or 0: values[run] for run in group.runs if math.isfinite(values[run])}
        for group in (a, b)
    )
    return Row(name, finite_a, finite_b, len(a.runs), goal)


def _numbers(
    held: Held, rows: Sequence[Row], methods: Sequence[Method], target: Target | None
) -> dict[str, Any]:
    """The comparison for a program."""
    a, b = held.groups
    found, answer = answer_of(a, b, held.metric)
    return {
        "a": shlex.join(methods[0].words),
        "b": shlex.join(methods[1].words),
        "names": {"a": a.name, "b": b.name},
        "seeds": [run.seed for run in a.runs],
        "metric": held.metric,
        "target": None if target is None else {"metric": target[0], "value": target[1]},
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


def add_files(parser: argparse.ArgumentParser) -> None:
    """The options for files of the figures and tables."""
    for flag, kinds, what in (
        ("--format", FORMATS, "also write each figure as a file"),
        ("--table", tuple(TABLES), "also write each table as a file"),
    ):
        words = ",".join(kinds)
        parser.add_argument(flag, type=partial(listed, kinds), default=(), metavar=words, help=what)


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
    add_files(parser)
    add("--json", action="store_true", help="print the comparison for a program")
    add_execution(parser)
    return parser
