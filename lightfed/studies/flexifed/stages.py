"""A metric after aggregation and after local training, over rounds: a chart for each.

A run may measure its clients at both stages: `personal/` at one of them, and `aggregated/` or
`trained/` at the other. If clients keep nothing, `finetuned/` is the server's model after a session
on the client's own data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Figure, Series
from lightfed.drawing.tidy import common_axis, course_table, file_name, stacked
from lightfed.results.groups import Group, Study, grouped, studied
from lightfed.results.outcome import traffic
from lightfed.results.run import Run
from lightfed.results.tables import readable

AGGREGATED, TRAINED = "after aggregation", "after local training"
MOMENTS = {"aggregated": AGGREGATED, "trained": TRAINED}  # as in environment.json


def stages(runs: Sequence[Run]) -> list[Study[Group]]:
    """The methods on each data set on which at least one of them measured both stages."""
    found = []
    for study in studied(grouped(runs), lambda group: group.data):
        columns = {group: stage_columns(group, study.metric) for group in study.members}
        if any(len(own) == 2 for own in columns.values()):
            members = tuple(group for group in study.members if columns[group])
            found.append(replace(study, members=members))
    return found


def stages_figure(found: Study[Group]) -> Figure | None:
    """A chart for each stage, a line for each method; None unless a line has two rounds."""
    tables = {}
    for stage in (AGGREGATED, TRAINED):
        columns = {g: stage_columns(g, found.metric).get(stage) for g in found.members}
        courses = [course_table(g, column, g.label) for g, column in columns.items() if column]
        if drawn := [table for table in courses if len(table) > 1]:
            tables[stage] = stacked(drawn, found.metric)
    if not tables:
        return None
    label = f"{readable(found.metric)} on the clients' own test samples"
    y = common_axis(found.metric, tables.values(), "mean", label)
    by = Series("series", {group.label: group.place for group in found.members}, "method")
    charts = tuple(
        marks.lines(table, Axis("round"), y, by, title=stage.capitalize())
        for stage, table in tables.items()
    )
    caption = (
        "The clients' own test samples. Without a server: a client's model after aggregation over "
        "its neighbours, before and after its local training in that round. With a server: the "
        "server's model and, if measured, each client's copy after local training. Bands: 95 % t "
        "intervals over seeds."
    )
    title = f"{found.name}: {readable(found.metric)} {AGGREGATED} and {TRAINED}{found.note}"
    return Figure(file_name("stages", found.name), title, charts, caption)


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
