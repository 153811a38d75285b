"""What the studies share: protocols, and charts of courses."""

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

MODEL = re.compile(r"model\.clients\.\d+\.model(\.class_path)?$")
# settings in which the experiments of a protocol may differ, or that its name says in other words
FREE = re.compile(
    r"model\.(algorithm\b|optimizer\.init_args\.lr$|clients\.\d+\.(?!count$|model\.init_args\.))"
    r"|data\.(dataset|partition)\b"
)
UNSPOKEN = re.compile(r"^model\.clients\.0\.model\.")
Panels = Mapping[str, Mapping[Group, str]]
Scale = tuple[Axis, Along]


def protocols(runs: Sequence[Run], algorithms: Sequence[str]) -> dict[str, list[Group]]:
    """Experiments that differ at most in their algorithm and learning rate, in this order.

    The name of a protocol has its data, its models, and what else tells it apart.
    """
    groups = [g for g in grouped(runs) if g.algorithm in algorithms and g.runs[0].config]
    groups.sort(key=lambda group: algorithms.index(group.algorithm))
    found: dict[str, list[Group]] = {}
    for name, own in gathered(groups, family).items():
        terms = [options(g.runs[0].settings, but=FREE, unspoken=UNSPOKEN) for g in own]
        for text, group in zip(told_apart(terms), own, strict=True):
            found.setdefault(", ".join(filter(None, (name, text))), []).append(group)
    return found


def family(group: Group) -> str:
    """Data and classes of models: `Digits, Conv`."""
    settings = group.runs[0].settings
    models = [value.rpartition(".")[2] for key, value in settings.items() if MODEL.fullmatch(key)]
    return ", ".join([group.condition, *dict.fromkeys(models)])


def best(groups: Sequence[Group], column: str) -> Group | None:
    """The experiment with the best mean over the seeds."""
    scores = {g: mean for g in groups if math.isfinite(mean := g.score(column)[0])}
    return best_of(scores, column) if scores else None


def course_figures(
    kind: str, name: str, title: str, panels: Panels, caption: str, along: Scale | None = None
) -> Iterator[Figure]:
    """A chart for each title in `panels`: the courses of a column by experiment, with one y-axis.

    They are over rounds, or over what `along` gives. Lines have at least two points.
    """
    groups = list(dict.fromkeys(group for columns in panels.values() for group in columns))
    x, at = along or (Axis("round"), None)
    tables = {}
    for panel, columns in panels.items():
        courses = [course_table(g, column, g.label, at) for g, column in columns.items()]
        if drawn := [course for course in courses if len(course) > 1]:
            tables[sentence(panel)] = stacked(drawn, usual_metric(groups))
    if tables:
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
