"""A metric after aggregation and after local training, over rounds: two lines for each method.

A run may measure its clients at both stages: `personal/` at one of them, and `aggregated/` or
`trained/` at the other. If clients keep nothing, `finetuned/` is the server's model after a session
on the client's own data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from lightfed.results.groups import Group, Study, grouped, studied
from lightfed.results.outcome import traffic
from lightfed.results.run import Run
from lightfed.results.tables import readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGGREGATED, TRAINED = "after aggregation", "after local training"
MOMENTS = {"aggregated": AGGREGATED, "trained": TRAINED}  # as in environment.json
LINES = {AGGREGATED: ("--", ":"), TRAINED: ("-", "-.")}  # the second where colours begin again


@dataclass(frozen=True)
class Stages(Study[Group]):
    """All methods with one data set.

    Attributes:
        colours: position of each among all rows of the comparison.
    """

    colours: Mapping[Group, int]

    @property
    def heading(self) -> str:
        return f"{self.name}: {readable(self.metric)} {AGGREGATED} and {TRAINED}"


def stages(runs: Sequence[Run]) -> list[Stages]:
    """The studies of stages: data sets on which at least one method measured both."""
    groups = grouped(runs)
    colours = {group: place for place, group in enumerate(groups)}
    found = []
    for study in studied(groups, lambda group: group.runs[0].data):
        columns = {group: stage_columns(group, study.metric) for group in study.members}
        if any(len(own) == 2 for own in columns.values()):
            members = tuple(group for group in study.members if columns[group])
            found.append(Stages(study.name, study.metric, members, colours))
    return found


def stages_figure(found: Stages, theme: Theme) -> Figure | None:
    """Dashed after aggregation, solid after local training; None unless a line has two rounds."""
    courses = [
        (found.colours[group], stage, group.course(column))
        for group in found.members
        for stage, column in stage_columns(group, found.metric).items()
    ]
    if all(len(course.index) < 2 for *_, course in courses):
        return None
    figure = new_figure(10.0, 5.4 + 0.05 * len(found.members), theme, pad=0.1)
    axes = figure.subplots()
    label = f"{readable(found.metric)} on the clients' own test samples, mean over clients"
    dress(axes, theme, title=found.heading + found.note, x_label="round", y_label=label)
    for group in found.members:
        colour = colour_of(found.colours[group])
        axes.plot([], [], color=colour, label=label_of(group.name))
    for stage, lines in LINES.items():
        axes.plot([], [], lines[0], color=theme.ink, label=stage)
    for place, stage, course in courses:
        line = LINES[stage][place // len(PALETTE) % 2]
        draw_course(
            axes, course.index.to_numpy(), course, colour=colour_of(place), line=line, label="_"
        )
    metric_axis(axes, found.metric, np.concatenate([course["mean"] for *_, course in courses]))
    whole_ticks(axes)
    legend_of_all(figure, axes, theme)
    return figure


def stage_columns(group: Group, metric: str) -> dict[str, str]:
    """The column of each stage that the runs of a group measured."""
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
    return any(traffic(run).max() > 0 for run in group.runs)
