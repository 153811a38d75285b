"""The figures of a run, and those of any comparison: courses, and how the clients fare.

Experiments on different data are never drawn in one chart: each condition has charts of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from lightfed.lab.drawing import marks
from lightfed.lab.drawing.marks import (
    Axis,
    Chart,
    Figure,
    Places,
    course_table,
    metric_axis,
    stacked,
)
from lightfed.lab.results.groups import Group, gathered
from lightfed.lab.results.run import (
    OF_CLIENTS,
    TIME,
    Run,
    base_name,
    primary_metric,
    traffic,
    worst_tenth,
)
from lightfed.lab.results.text import ends_text, holders, metric_text, readable, sentence, unit_of

CELLS = 2000  # of a heat map
DRAG = "Drag to move, Ctrl and wheel to zoom, double click to go back."
# columns of a metric and their names in a legend
LINES = {
    "global/{}": "global",
    "personal/{}": "personal, mean",
    "personal/{}_worst10": "personal, worst 10 %",
    **{f"{kind}/{{}}": f"{name}, mean" for kind, (name, _) in OF_CLIENTS.items()},
    "train_{}": "training",
}
# of what a rule of low-rank adapters applies, to the mean of the clients' updates
ERRORS = {"aggregation_error": "whole model", "aggregation_error_worst": "worst layer"}


def run_figures(run: Run) -> list[Figure]:
    """Those that the files of the run allow."""
    return [*filter(None, (course(run), clients(run), partition(run)))]


def course(run: Run) -> Figure | None:
    """Metrics, losses, and the metric for bytes and virtual time; None below two evaluations."""
    primary = base_name(primary_metric(run))
    places = {text: place for place, text in enumerate(LINES.values())}
    charts: list[Chart] = []
    for name in dict.fromkeys([primary, "loss", *map(base_name, run.metrics)]):
        table = _lines(run, {column.format(name): text for column, text in LINES.items()}, name)
        y = metric_axis("value", name, table["value"])
        charts += _over_rounds(table, y, places, sentence(name))
        if name == primary:
            spent = pd.DataFrame({"sent": traffic(run), "time": run.series(TIME)})
            costs = table.drop(columns=["low", "high"]).merge(spent, on="round")
            charts += _over_costs(costs, y, places, sentence(name))
    errors = _lines(run, ERRORS, "aggregation_error")
    y = metric_axis("value", "aggregation_error", errors["value"])
    each = {text: place for place, text in enumerate(ERRORS.values(), len(places))}
    charts += _over_rounds(errors, y, each, sentence("aggregation_error"))
    caption = (
        "Personal: a client's model on its own test samples; the band is one standard deviation "
        f"over the clients. Bytes are those the algorithm sends, for all clients. {DRAG}"
    )
    return Figure("curves", "Course of the run", tuple(charts), caption) if charts else None


def clients(run: Run) -> Figure | None:
    """How the clients fare, by group; None without their evaluation."""
    metric, table = base_name(primary_metric(run)), run.evaluation
    if metric not in table or not np.isfinite(table[metric]).any():
        return None
    places = {name: place for place, name in enumerate(run.client_groups)}
    title, each = sentence(metric), table.rename(columns={"group": "series"})
    x, y = metric_axis(metric, metric, table[metric]), Axis("series", "client group")
    charts = [marks.spread(each, x, y, places, title=f"{title} of each client")]
    groups = _lines(run, {f"personal/{metric}/{name}": name for name in places}, metric)
    y = metric_axis("value", metric, groups["value"])
    charts += _over_rounds(groups, y, places, f"{title} by client group")
    scores, after = table[metric], f"After round {table['round'].iloc[0]}"
    worst = metric_text(metric, worst_tenth(scores, metric))
    caption = (
        f"{after}: mean {metric_text(metric, scores.mean())}, worst tenth {worst}, "
        f"{scores.count():,} clients{run.note}. {marks.BOXES}"
    )
    return Figure("clients", "Clients: who suffers", tuple(charts), caption)


def partition(run: Run) -> Figure | None:
    """Training samples by class and client; None without a partition."""
    if (counts := run.partition) is None:
        return None
    held, classes = counts.sum(axis=1), (counts > 0).sum(axis=1)
    most = min(len(counts), max(marks.MOST_CELLS, min(200, CELLS // counts.shape[1])))
    by_class, title = counts.T.rename_axis("class"), "Training samples by class and client"
    across = "client"
    held_by = holders(run.group_sizes, run.environment.get("parts", ()))
    if len({*held_by}) > 1:
        by_class.columns = pd.Index([f"{k} {name}" for k, name in enumerate(held_by)])
        across = "client and group"
    heat = marks.heat(by_class, across, Axis("samples"), title=title, most=most)
    part = f"; {most} of them are drawn" * (most < len(counts))
    caption = (
        f"{len(counts):,} clients hold {held.min():,} to {held.max():,} samples (median "
        f"{held.median():,.0f}) of {ends_text(sorted(classes))} classes{part}."
    )
    return Figure("partition", "Partition", (heat,), caption)


def comparison_figures(groups: Sequence[Group], column: str) -> list[Figure]:
    """Those that the runs allow; each label has one colour and one dash in all of them."""
    places = {group.label: group.place for group in groups}
    conditions = gathered(groups, lambda group: group.condition)
    metric = base_name(column)
    courses: list[Chart] = []
    spreads: list[Chart] = []
    for condition, own in conditions.items():
        begin = f"{condition}: " * (len(conditions) > 1)
        table = stacked([course_table(group, column, group.label) for group in own], column)
        title = f"{begin}{sentence(column)}"
        y = metric_axis("mean", metric, table["mean"])
        if over_rounds := _over_rounds(table, y, places, title):
            courses += [*over_rounds, *_over_costs(table, y, places, title)]
        tested = {
            (group.label, run.seed): run.evaluation[[metric]]
            for group in own
            for run in group.runs
            if metric in run.evaluation
        }
        if tested:
            table = pd.concat(tested, names=["series", "seed"]).reset_index("series")
            x, y = metric_axis(metric, metric, table[metric]), Axis("series", "experiment")
            title = f"{begin}{sentence(metric)} over clients"
            spreads.append(marks.spread(table, x, y, places, title=title))
    lines = f"Lines: {seeds_note(groups) or 'single runs'}. {DRAG}"
    boxes = f"The clients of all runs of an experiment at their last evaluation. {marks.BOXES}"
    figures = (
        Figure("comparison", f"Course of the {readable(column)}", tuple(courses), lines),
        Figure(
            "comparison-clients",
            f"Spread of the {readable(metric)} over clients",
            tuple(spreads),
            boxes,
        ),
    )
    return [figure for figure in figures if figure.charts]


def seeds_note(groups: Sequence[Group], *, std: bool = False) -> str:
    """`mean and 95 % t interval over 5 seeds`; empty if every row is one run."""
    counts = sorted(len(group.runs) for group in groups)
    spread = "sample deviation" if std else "95 % t interval"
    return f"mean and {spread} over {ends_text(counts)} seeds" if counts[-1] > 1 else ""


def _lines(run: Run, columns: Mapping[str, str], metric: str) -> pd.DataFrame:
    """A row for each measured round and column: `round`, `series`, `value`, `low`, `high`."""
    parts = []
    for column, name in columns.items():
        values, std = run.series(column), run.series(f"{column}_std")
        own = {"value": values, "low": values - std, "high": values + std, "series": name}
        parts.append(pd.DataFrame(own).dropna(subset=["value"]).reset_index(names="round"))
    return stacked(parts, metric)


def _over_rounds(table: pd.DataFrame, y: Axis, places: Places, title: str) -> list[Chart]:
    """A chart of lines; none below two evaluations."""
    drawn = table["round"].nunique() > 1
    return [marks.lines(table, Axis("round"), y, places, title=title)] if drawn else []


def _over_costs(table: pd.DataFrame, y: Axis, places: Places, title: str) -> list[Chart]:
    """Lines over the columns `sent` and `time`; none where one does not vary.

    The axes have units with short numbers; that of bytes is logarithmic over decades.
    """
    charts = []
    for column, spent, over in (
        ("sent", "sent by all clients and the server", "for the bytes sent"),
        ("time", "virtual time of the clients' devices", "for virtual time"),
    ):
        known = table[table[column] > 0]
        if known[column].nunique() < 2:
            continue
        least, most = float(known[column].min()), float(known[column].max())
        factor, unit = unit_of(most, "B")
        if column == "time":
            units = ((7200, 3600.0, "h"), (120, 60.0, "min"), (0, 1.0, "s"))
            factor, unit = next((factor, unit) for from_, factor, unit in units if most >= from_)
        log = column == "sent" and 20 * least < most
        x = Axis(column, f"{spent} ({unit}{', log' * log})", log=log)
        scaled = known.assign(**{column: known[column] / factor})
        charts.append(marks.lines(scaled, x, y, places, title=f"{title} {over}"))
    return charts
