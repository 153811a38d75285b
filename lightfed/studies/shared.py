"""What the studies share: protocols, cells of their tables, and charts of courses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pandas import DataFrame

from lightfed.drawing import marks
from lightfed.drawing.marks import (
    Along,
    Axis,
    Chart,
    Figure,
    Series,
    common_axis,
    course_table,
    file_name,
    stacked,
)
from lightfed.results.groups import (
    Group,
    best_of,
    costs_to,
    final_text,
    gathered,
    grouped,
    options,
    resolution_text,
    synthetic_note,
    told_apart,
)
from lightfed.results.run import Run
from lightfed.results.text import (
    bytes_text,
    flops_text,
    goal_text,
    metric_text,
    readable,
)

MODEL = re.compile(r"model\.clients\.\d+\.model(\.class_path)?$")
# settings in which the experiments of a protocol may differ, or that its name says in other words
FREE = re.compile(
    r"model\.(algorithm\b|optimizer\.init_args\.lr$|clients\.(?!0\.model\.init_args\.))"
    r"|data\.(dataset|partition)\b"
)
UNSPOKEN = re.compile(r"^model\.clients\.0\.model\.")
ROUNDS = Axis("round")
READ = (
    "Mean over the clients, each with its own model and test samples, and 95 % t interval over the "
    "seeds; the best has a star. Rounds, bytes (up and down) and FLOPs of all clients until the "
    "target was first measured: mean over the seeds, a dash unless all reached it."
)


@dataclass(frozen=True)
class StudyTable:
    """Cells of text, the name of its files, and how to read it."""

    name: str
    title: str
    cells: DataFrame
    notes: tuple[str, ...]


def protocols(runs: Sequence[Run], algorithms: Sequence[str]) -> dict[str, list[Group]]:
    """Experiments that differ at most in their algorithm and learning rate, in this order.

    The name of a protocol has its data, its models, and options that tell it from others on these.
    """
    groups = [g for g in grouped(runs) if g.algorithm in algorithms and g.runs[0].settings]
    groups.sort(key=lambda group: algorithms.index(group.algorithm))
    found: dict[str, list[Group]] = {}
    for name, own in gathered(groups, family).items():
        for group, text in zip(own, told_apart([_options(group) for group in own]), strict=True):
            found.setdefault("; ".join(filter(None, (name, text))), []).append(group)
    return found


def _options(group: Group) -> dict[str, str]:
    run = group.runs[0]
    sizes = ", ".join(f"{count} {name}" for name, count in run.group_sizes.items())
    return {"groups": sizes} | options(run.settings, but=FREE, unspoken=UNSPOKEN)


def family(group: Group) -> str:
    """Data and classes of models: `Digits, Conv`."""
    settings = group.runs[0].settings
    models = [value.rpartition(".")[2] for key, value in settings.items() if MODEL.fullmatch(key)]
    return ", ".join([group.condition, *dict.fromkeys(models)])


def best(groups: Sequence[Group], column: str) -> Group | None:
    """The experiment with the best mean over the seeds."""
    scores = {group: group.score(column)[0] for group in groups}
    known = {group: score for group, score in scores.items() if math.isfinite(score)}
    return best_of(known, column) if known else None


def starred(groups: Sequence[Group], column: str) -> list[str]:
    """The final values of several experiments as text, with a star before the best."""
    first = best(groups, column)
    top = first.score(column)[0] if first and len(groups) > 1 else math.nan
    return ["*" * (g.score(column)[0] == top) + final_text(g, column) for g in groups]


def cost_cells(group: Group, column: str, target: float, runs: Sequence[Run]) -> dict[str, str]:
    """What a target cost: means over the seeds, dashes unless all reached it.

    The heading has the resolution of all `runs` of the table.
    """
    rounds, sent, flops = costs_to(target, group.runs, column)
    goal = f"{goal_text(column, target)}, resolution {resolution_text(runs, column)}"
    return {
        f"rounds to {goal}": metric_text("", rounds),
        "bytes until then": bytes_text(sent),
        "FLOPs until then": flops_text(flops),
    }


def table_of(
    title: str, name: str, rows: Sequence[dict[str, str]], note: str, members: Sequence[Group]
) -> StudyTable:
    """A table with a row for each experiment; its title says if they used synthetic data."""
    heading, files = f"{name}: {title}{synthetic_note(members)}", title.replace(" ", "-")
    return StudyTable(file_name(files, name), heading, DataFrame(rows, dtype="str"), (READ, note))


def course_charts(
    panels: Mapping[str, Mapping[Group, str]],
    names: Mapping[Group, str],
    metric: str,
    x: Axis = ROUNDS,
    along: Along | None = None,
) -> list[Chart]:
    """For each title a chart of the courses of a column by experiment, all with one y-axis.

    `names` are those of the lines, which need two measured rounds.
    """
    tables = {}
    for title, columns in panels.items():
        courses = [course_table(g, column, names[g], along) for g, column in columns.items()]
        if drawn := [course for course in courses if len(course) > 1]:
            tables[title] = stacked(drawn, metric)
    if not tables:
        return []
    y = common_axis(metric, tables.values(), "mean", readable(metric))
    by = Series("series", {name: group.place for group, name in names.items()}, "method")
    return [marks.lines(table, x, y, by, title=title) for title, table in tables.items()]


def figures_of(
    kind: str, name: str, title: str, charts: Sequence[Chart], caption: str, groups: Sequence[Group]
) -> Iterator[Figure]:
    """A figure of the charts, whose title says if the runs used synthetic data; none without."""
    if charts:
        title = f"{name}: {title}{synthetic_note(groups)}"
        yield Figure(file_name(kind, name), title, tuple(charts), caption)
