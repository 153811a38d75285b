"""The figures of any comparison: courses, final values, costs, and the spread over clients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Chart, Figure, Series, metric_axis
from lightfed.drawing.tidy import score_row, stacked
from lightfed.report.run_figures import scaled_axis
from lightfed.results.columns import OF_CLIENTS, base_name
from lightfed.results.csvfile import finite
from lightfed.results.groups import Group, courses
from lightfed.results.outcome import client_metric, outcome_of
from lightfed.results.tables import readable, sentence

COSTS = {
    "sent": ("sent by all clients and the server", "B", "bytes sent"),
    "flops": ("computed by all clients", "FLOPs", "computation"),
    "stored_bytes": ("kept by a client", "B", "bytes kept"),
    "seconds": ("time of the run", "s", "time"),
}
DRAG = "Drag to move, shift and wheel to zoom, double click to go back."


def comparison_figures(groups: Sequence[Group], column: str) -> list[Figure]:
    """Those that the runs allow; each group has one colour and one dash in all of them."""
    by = Series("label", {group.label: group.place for group in groups}, "experiment")
    made = (
        _courses(groups, column, by),
        _finals(groups, column, by),
        _costs(groups, column, by),
        _clients(groups, column, by),
    )
    return [figure for figure in made if figure is not None]


def seeds_note(groups: Sequence[Group]) -> str:
    """`mean and 95 % t interval over 5 seeds`; empty if every row is one run."""
    counts = sorted({len(group.runs) for group in groups})
    if counts[-1] == 1:
        return ""
    ends = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return f"mean and 95 % t interval over {ends} seeds"


def _courses(groups: Sequence[Group], column: str, by: Series) -> Figure | None:
    table = stacked([courses(groups, [column])], column)
    if table["round"].nunique() < 2:
        return None
    metric = base_name(column)
    y = metric_axis("mean", metric, table["mean"])
    title = sentence(column)
    charts = [marks.lines(table, Axis("round"), y, by, title=title)]
    sent = table[table["sent"] > 0]
    if sent["sent"].nunique() > 1:
        x, scaled = scaled_axis("sent", *COSTS["sent"][:2], sent["sent"])
        named = f"{title} for the bytes sent"
        charts.append(marks.lines(sent.assign(sent=scaled), x, y, by, title=named))
    note = seeds_note(groups)
    caption = f"Lines: {note}. {DRAG}" if note else DRAG
    return Figure("comparison", f"Course of the {readable(column)}", tuple(charts), caption)


def _finals(groups: Sequence[Group], column: str, by: Series) -> Figure | None:
    metric = base_name(column)
    columns = {
        f"global/{metric}": "global model",
        f"personal/{metric}": "personal, mean over clients",
        f"personal/{metric}_worst10": "personal, worst 10 % of the clients",
        **{f"{kind}/{metric}": text for kind, (_, text) in OF_CLIENTS.items()},
    }
    charts = [_final(groups, name, title, by) for name, title in columns.items()]
    drawn = tuple(chart for chart in charts if chart is not None)
    note = seeds_note(groups)
    caption = f"Points: {note}." if note else ""
    return (
        Figure("comparison-finals", f"Final {readable(metric)}", drawn, caption) if drawn else None
    )


def _final(groups: Sequence[Group], column: str, title: str, by: Series) -> Chart | None:
    rows = [score_row(group, column, label=group.label) for group in groups]
    table = stacked([pd.DataFrame(rows).dropna(subset=["value"])], column)
    if table.empty:
        return None
    x = metric_axis("value", column, table["value"], title=readable(base_name(column)))
    return marks.points(table, x, Axis("label", by.title), by, across=True, title=sentence(title))


def _costs(groups: Sequence[Group], column: str, by: Series) -> Figure | None:
    outcomes = [(g.label, outcome_of(run, primary=column)) for g in groups for run in g.runs]
    rows = [
        {"label": label, "value": o.run.final(column), **{c: getattr(o, c) for c in COSTS}}
        for label, o in outcomes
    ]
    table = pd.DataFrame(rows).replace(math.inf, math.nan)
    metric = base_name(column)
    y = metric_axis("value", column, table["value"], title=readable(column))
    charts = []
    for name, (title, unit, short) in COSTS.items():
        known = table[table[name] > 0]
        if known[name].nunique() > 1:
            x, scaled = scaled_axis(name, title, unit, known[name])
            heading = f"{sentence(metric)} and {short}"
            charts.append(marks.points(known.assign(**{name: scaled}), x, y, by, title=heading))
    caption = f"A point is a run, at its final {readable(column)}."
    return Figure("comparison-costs", "Costs", tuple(charts), caption) if charts else None


def _clients(groups: Sequence[Group], column: str, by: Series) -> Figure | None:
    metric = base_name(column)
    parts = [
        finite(run.evaluation[[metric]]).assign(label=group.label)
        for group in groups
        for run in group.runs
        if client_metric(run, metric) == metric and metric in run.evaluation
    ]
    if not parts:
        return None
    table = pd.concat(parts, ignore_index=True)
    x = metric_axis(metric, metric, table[metric])
    title = f"Spread of the {readable(metric)} over clients"
    spread = marks.spread(table, x, Axis("label", by.title), by, title=title)
    caption = (
        "The clients of all runs of an experiment at their last evaluation. Boxes: quartiles; "
        "lines: 5 % to 95 %; bars: median (thick) and mean (thin)."
    )
    return Figure("comparison-clients", title, (spread,), caption)
