"""A metric after aggregation and after local training, over rounds: two lines for each method.

A run may measure its clients at both moments: `personal/` at one of them, and `aggregated/` or
`trained/` at the other. Of a method whose clients keep nothing, `finetuned/`, where the run
measured it, is the server's model after a session on the client's own data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.axes import metric_axis
from lightfed.drawing.style import (
    PALETTE,
    Theme,
    colour_of,
    dress,
    label_of,
    legend_of_all,
    new_figure,
    whole_ticks,
)
from lightfed.drawing.versus import draw_course
from lightfed.results.groups import Group, grouped, synthetic_note, usual_metric
from lightfed.results.outcome import traffic
from lightfed.results.runfiles import RunFiles
from lightfed.results.tables import readable
from lightfed.results.variants import gathered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGGREGATED, TRAINED = "after aggregation", "after local training"
MOMENTS = {"aggregated": AGGREGATED, "trained": TRAINED}  # as environment.json says it
LINES = {AGGREGATED: ("--", ":"), TRAINED: ("-", "-.")}  # the second where colours begin again


@dataclass(frozen=True)
class Method:
    """One experiment, whose runs differ in the seed alone.

    Attributes:
        group: its runs.
        place: among all rows of the comparison, which is its colour.
        columns: of metrics.csv, for each stage that was measured.
    """

    group: Group
    place: int
    columns: dict[str, str]


@dataclass(frozen=True)
class Stages:
    """What shares a picture: all methods with one data set.

    Attributes:
        data: the data set as the runs name it.
        metric: without `personal/`.
        methods: in the order in which their runs were named.
    """

    data: str
    metric: str
    methods: tuple[Method, ...]


def stages(runs: Sequence[RunFiles]) -> list[Stages]:
    """What can be drawn of stages: data sets with which some method measured both."""
    placed = gathered(enumerate(grouped(runs)), lambda pair: pair[1].runs[0].data)
    every = [_stages(data, found) for data, found in placed.items()]
    return [one for one in every if any(len(method.columns) == 2 for method in one.methods)]


def stages_figure(found: Stages, theme: Theme) -> Figure | None:
    """Dashed after aggregation, solid after local training; None unless a line has two rounds."""
    courses = [
        (method, stage, method.group.course(column))
        for method in found.methods
        for stage, column in method.columns.items()
    ]
    if all(len(course.rounds) < 2 for *_, course in courses):
        return None
    figure = new_figure(10.0, 5.4 + 0.05 * len(found.methods), theme, pad=0.1)
    axes = figure.subplots()
    note = synthetic_note(method.group for method in found.methods)
    label = f"{readable(found.metric)} on the clients' own test samples, mean over clients"
    dress(axes, theme, title=stages_heading(found) + note, x_label="round", y_label=label)
    for method in found.methods:
        axes.plot([], [], color=colour_of(method.place), label=label_of(method.group.label))
    for stage, lines in LINES.items():
        axes.plot([], [], lines[0], color=theme.ink, label=stage)
    for method, stage, course in courses:
        again = method.place // len(PALETTE) % 2
        colour, line = colour_of(method.place), LINES[stage][again]
        draw_course(axes, course.rounds, course, colour=colour, line=line, label="_")
    metric_axis(axes, found.metric, np.concatenate([course.mean for *_, course in courses]))
    whole_ticks(axes)
    legend_of_all(figure, axes, theme)
    return figure


def stages_heading(found: Stages) -> str:
    return f"{found.data}: {readable(found.metric)} {AGGREGATED} and {TRAINED}"


def _stages(data: str, members: Sequence[tuple[int, Group]]) -> Stages:
    metric = usual_metric(group for _, group in members)
    methods = [Method(group, place, stage_columns(group, metric)) for place, group in members]
    return Stages(data, metric, tuple(method for method in methods if method.columns))


def stage_columns(group: Group, metric: str) -> dict[str, str]:
    """Where the runs of a group hold each stage that they measured."""
    kinds = {AGGREGATED: ["aggregated"], TRAINED: ["trained", "finetuned"]}
    kinds[_moment(group, metric)].insert(0, "personal")
    found = {
        stage: [column for kind in own if _measured(group, column := f"{kind}/{metric}")]
        for stage, own in kinds.items()
    }
    return {stage: columns[0] for stage, columns in found.items() if columns}


def _moment(group: Group, metric: str) -> str:
    """The stage of `personal/`."""
    stated = MOMENTS.get(str(group.runs[0].environment.get("evaluate_at")))
    # clients that train alone never aggregate
    twice = _measured(group, f"aggregated/{metric}")
    return stated or (AGGREGATED if _sends(group) and not twice else TRAINED)


def _measured(group: Group, column: str) -> bool:
    return math.isfinite(group.score(column)[0])


def _sends(group: Group) -> bool:
    return any(np.nanmax(traffic(run), initial=0.0) > 0 for run in group.runs)
