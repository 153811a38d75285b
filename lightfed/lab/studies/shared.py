"""What the figures of several papers share: protocols, and charts of courses."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from lightfed.lab.drawing import marks
from lightfed.lab.drawing.marks import (
    Along,
    Axis,
    Chart,
    Figure,
    common_axis,
    course_table,
    file_name,
    stacked,
)
from lightfed.lab.results.groups import (
    Group,
    best_of,
    gathered,
    grouped,
    options,
    synthetic_note,
    told_apart,
    usual_metric,
)
from lightfed.lab.results.run import Run
from lightfed.lab.results.text import readable, sentence

# The keys that name the class of a group's model.
MODEL = re.compile(r"model\.clients\.\d+\.model(\.class_path)?$")
# Settings in which the experiments of a protocol may differ, or that its name says in other words.
FREE = re.compile(
    r"model\.(algorithm\b|optimizer\.init_args\.lr$|clients\.\d+\.(?!count$|model\.init_args\.))"
    r"|data\.(dataset|partition)\b"
)
# The beginning of a key that the name of a protocol leaves out.
UNSPOKEN = re.compile(r"^model\.clients\.0\.model\.")

Panels = Mapping[str, Mapping[Group, str]]
Scale = tuple[Axis, Along]


def protocols(runs: Sequence[Run], algorithms: Sequence[str]) -> dict[str, list[Group]]:
    """Gather the experiments that differ at most in their algorithm and learning rate.

    Args:
        runs: Runs of any kind; those of other algorithms are skipped.
        algorithms: Names of classes, in the order that the experiments of a protocol get.

    Returns:
        The experiments by the name of their protocol: its data, its models, and what else tells it
        apart from others.
    """
    groups = []
    for group in grouped(runs):
        if group.algorithm in algorithms and group.runs[0].config:
            groups.append(group)
    groups.sort(key=lambda group: algorithms.index(group.algorithm))

    found: dict[str, list[Group]] = {}
    for name, members in gathered(groups, family).items():
        settings = []
        for group in members:
            settings.append(options(group.runs[0].settings, but=FREE, unspoken=UNSPOKEN))
        for difference, group in zip(told_apart(settings), members, strict=True):
            protocol = f"{name}, {difference}" if difference else name
            found.setdefault(protocol, []).append(group)
    return found


def family(group: Group) -> str:
    """The data and the classes of models of an experiment, such as `Digits, Conv`."""
    models = []
    for key, value in group.runs[0].settings.items():
        if MODEL.fullmatch(key):
            models.append(value.rpartition(".")[2])
    each_once = dict.fromkeys(models)
    return ", ".join([group.condition, *each_once])


def best(groups: Sequence[Group], column: str) -> Group | None:
    """The experiment with the best mean of a column over the seeds; None if none has a mean."""
    means = {}
    for group in groups:
        mean, _ = group.score(column)
        if math.isfinite(mean):
            means[group] = mean
    return best_of(means, column) if means else None


def course_figures(
    kind: str, name: str, title: str, panels: Panels, caption: str, along: Scale | None = None
) -> Iterator[Figure]:
    """Draw courses in a chart for each panel, all with the same y-axis.

    Args:
        kind: What kind of figure it is, for the names of its files.
        name: The protocol or the data that all experiments share.
        title: What is said after the metric, such as `against rounds`.
        panels: By the title of a chart, the column of metrics.csv to draw for each experiment.
        caption: How to read the charts.
        along: The x-axis, and what gives its values for a run; by default rounds.

    Yields:
        A single figure, or none if no experiment was measured at least twice.
    """
    every_group = [group for columns in panels.values() for group in columns]
    groups = list(dict.fromkeys(every_group))
    x, values_along = (Axis("round"), None) if along is None else along

    tables = {}
    for panel, columns in panels.items():
        courses = []
        for group, column in columns.items():
            course = course_table(group, column, group.label, values_along)
            if len(course) > 1:
                courses.append(course)
        if courses:
            tables[sentence(panel)] = stacked(courses, usual_metric(groups))
    if not tables:
        return

    metric = usual_metric(groups)
    y = common_axis(metric, tables.values(), "mean", readable(metric))
    places = {group.label: group.place for group in groups}
    charts = [marks.lines(table, x, y, places, title=panel) for panel, table in tables.items()]
    yield figure_of(kind, name, f"{readable(metric)} {title}", charts, caption, groups)


def figure_of(
    kind: str, name: str, title: str, charts: Sequence[Chart], caption: str, groups: Sequence[Group]
) -> Figure:
    """A figure whose title begins with its protocol, and says if the runs used synthetic data."""
    heading = f"{name}: {title}{synthetic_note(groups)}"
    return Figure(file_name(kind, name), heading, tuple(charts), caption)
