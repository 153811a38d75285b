"""The figures of any comparison: courses, final values, and the spread over clients.

Experiments on different data are never drawn in one chart: each condition has charts of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Chart, Figure, Series, metric_axis
from lightfed.drawing.tidy import course_table, score_row, stacked
from lightfed.report.run_figures import DRAG, over_bytes
from lightfed.results.columns import OF_CLIENTS, base_name
from lightfed.results.csvfile import finite
from lightfed.results.groups import Group
from lightfed.results.settings import gathered
from lightfed.results.tables import readable, sentence


def comparison_figures(groups: Sequence[Group], column: str) -> list[Figure]:
    """Those that the runs allow; each label has one colour and one dash in all of them."""
    by = Series("label", {group.label: group.place for group in groups}, "experiment")
    conditions = gathered(groups, lambda group: group.condition)
    note, metric = seeds_note(groups) or "single runs", readable(base_name(column))
    spread = f"The clients of all runs of an experiment at their last evaluation. {marks.BOXES}"
    figures = []
    for name, title, caption, draw in (
        ("comparison", f"Course of the {readable(column)}", f"Lines: {note}. {DRAG}", _courses),
        ("comparison-finals", f"Final {metric}", f"Points: {note}.", _finals),
        ("comparison-clients", f"Spread of the {metric} over clients", spread, _clients),
    ):
        charts: list[Chart] = []
        for condition, own in conditions.items():
            charts += draw(own, column, by, f"{condition}: " if len(conditions) > 1 else "")
        if charts:
            figures.append(Figure(name, title, tuple(charts), caption))
    return figures


def seeds_note(groups: Sequence[Group]) -> str:
    """`mean and 95 % t interval over 5 seeds`; empty if every row is one run."""
    counts = sorted({len(group.runs) for group in groups})
    ends = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1]))))
    return f"mean and 95 % t interval over {ends} seeds" if counts[-1] > 1 else ""


def _courses(groups: Sequence[Group], column: str, by: Series, begin: str) -> list[Chart]:
    tables = [course_table(group, column, group.label) for group in groups]
    table = stacked(tables, column).rename(columns={"series": "label"})
    if table["round"].nunique() < 2:
        return []
    y = metric_axis("mean", base_name(column), table["mean"])
    title = f"{begin}{sentence(column)}"
    over_rounds = marks.lines(table, Axis("round"), y, by, title=title)
    return [over_rounds, *over_bytes(table, y, by, title)]


def _finals(groups: Sequence[Group], column: str, by: Series, begin: str) -> list[Chart]:
    metric = base_name(column)
    columns = {
        f"global/{metric}": "global model",
        f"personal/{metric}": "personal, mean over clients",
        f"personal/{metric}_worst10": "personal, worst 10 % of the clients",
        **{f"{kind}/{metric}": text for kind, (_, text) in OF_CLIENTS.items()},
    }
    charts = []
    for name, title in columns.items():
        rows = [score_row(group, name, label=group.label) for group in groups]
        table = stacked([pd.DataFrame(rows).dropna(subset=["value"])], name)
        if len(table):
            x = metric_axis("value", name, table["value"], title=readable(metric))
            y, text = Axis("label", by.title), f"{begin}{sentence(title)}"
            charts.append(marks.points(table, x, y, by, across=True, title=text))
    return charts


def _clients(groups: Sequence[Group], column: str, by: Series, begin: str) -> list[Chart]:
    metric = base_name(column)
    parts = [
        finite(run.evaluation[[metric]]).assign(label=group.label)
        for group in groups
        for run in group.runs
        if metric in run.evaluation
    ]
    if not parts:
        return []
    table = pd.concat(parts, ignore_index=True)
    x = metric_axis(metric, metric, table[metric])
    title = f"{begin}{sentence(metric)} over clients"
    return [marks.spread(table, x, Axis("label", by.title), by, title=title)]
