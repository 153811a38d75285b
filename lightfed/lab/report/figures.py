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
)
from lightfed.lab.results.text import ends_text, holders, metric_text, readable, sentence, unit_of

# The number of cells of a heat map from which on clients are left out.
MOST_CELLS_IN_ALL = 2000
MOST_CLIENTS = 200

DRAG = "Drag to move, use Ctrl and the wheel to zoom, double-click to reset."

# The columns of a metric, and their names in a legend.
LINES = {
    "global/{}": "global",
    "personal/{}": "personal, mean",
    "personal/{}_worst10": "personal, worst 10 %",
    **{f"{kind}/{{}}": f"{name}, mean" for kind, (name, _) in OF_CLIENTS.items() if kind != "gap"},
    "train_{}": "training",
}

# How far what a rule of low-rank adapters applies is from the mean of the clients' updates.
ERRORS = {"aggregation_error": "whole model", "aggregation_error_worst": "worst layer"}

# Units of virtual time: the seconds from which one is used, its seconds, and its name.
_TIME_UNITS = ((7200, 3600.0, "h"), (120, 60.0, "min"), (0, 1.0, "s"))


def run_figures(run: Run) -> list[Figure]:
    """Return the figures that the files of a run allow."""
    figures = (course(run), clients(run), partition(run))
    return [figure for figure in figures if figure is not None]


def course(run: Run) -> Figure | None:
    """Return the course of a run: its metrics and losses by round.

    The main metric is also drawn over bytes and virtual time.

    Returns:
        The figure; None if there are fewer than two evaluations.
    """
    main_metric = base_name(primary_metric(run))
    metrics = dict.fromkeys([main_metric, "loss", *map(base_name, run.metrics)])
    place_of_line = {name: place for place, name in enumerate(LINES.values())}

    charts: list[Chart] = []
    for metric in metrics:
        columns = {column.format(metric): name for column, name in LINES.items()}
        table = _lines(run, columns, metric)
        y = metric_axis("value", metric, table["value"])
        charts += _over_rounds(table, y, place_of_line, sentence(metric))

        if metric == main_metric:
            spent = pd.DataFrame({"sent": traffic(run), "time": run.series(TIME)})
            over_costs = table.drop(columns=["low", "high"]).merge(spent, on="round")
            charts += _over_costs(over_costs, y, place_of_line, sentence(metric))

    # Errors of adapters have colors of their own, after those of the metrics.
    errors = _lines(run, ERRORS, "aggregation_error")
    y = metric_axis("value", "aggregation_error", errors["value"])
    place_of_error = {
        name: place for place, name in enumerate(ERRORS.values(), start=len(place_of_line))
    }
    charts += _over_rounds(errors, y, place_of_error, sentence("aggregation_error"))

    if not charts:
        return None
    caption = (
        "Personal: a client's model on its own test samples; the band is one standard deviation "
        f"over the clients. Bytes are those that the method sends, for all clients. {DRAG}"
    )
    return Figure("curves", "Learning curves", tuple(charts), caption)


def clients(run: Run) -> Figure | None:
    """Return how the clients fare, by group; None if they were not evaluated."""
    metric = base_name(primary_metric(run))
    table = run.evaluation
    if metric not in table or not np.isfinite(table[metric]).any():
        return None

    title = sentence(metric)
    scores = table[metric]
    place_of_group = {name: place for place, name in enumerate(run.client_groups)}

    spread = marks.spread(
        table.rename(columns={"group": "series"}),
        metric_axis(metric, metric, scores),
        Axis("series", "client group"),
        place_of_group,
        title=f"{title} of each client",
    )

    columns = {f"personal/{metric}/{name}": name for name in place_of_group}
    groups = _lines(run, columns, metric)
    y = metric_axis("value", metric, groups["value"])
    over_rounds = _over_rounds(groups, y, place_of_group, f"{title} by client group")

    mean = metric_text(metric, scores.mean())
    worst = metric_text(metric, run.worst_clients(metric))
    if run.validates_clients(metric):
        worst += " (worst on validation samples)"
    caption = (
        f"After round {table['round'].iloc[0]}: mean {mean}, worst tenth {worst}, "
        f"{scores.count():,} clients{run.note}. {marks.BOXES}"
    )
    heading = f"{title} per client"
    return Figure("clients", heading, (spread, *over_rounds), caption)


def partition(run: Run) -> Figure | None:
    """Return the training samples by class and client; None without a partition."""
    counts = run.partition
    if counts is None:
        return None

    num_clients, num_classes = counts.shape
    samples = counts.sum(axis=1)
    classes = sorted((counts > 0).sum(axis=1))

    # With few classes, more clients can be drawn.
    most = max(marks.MOST_CELLS, min(MOST_CLIENTS, MOST_CELLS_IN_ALL // num_classes))
    most = min(num_clients, most)

    by_class = counts.T.rename_axis("class")
    across = "client"
    models = holders(run.group_sizes, run.environment.get("parts", ()))
    if len(set(models)) > 1:
        by_class.columns = pd.Index([f"{client} {model}" for client, model in enumerate(models)])
        across = "client and group"

    title = "Training samples by class and client"
    heat = marks.heat(by_class, across, Axis("samples"), title=title, most=most)

    caption = (
        f"{num_clients:,} clients hold {samples.min():,} to {samples.max():,} samples (median "
        f"{samples.median():,.0f}) of {ends_text(classes)} classes"
    )
    if most < num_clients:
        caption += f"; {most} of them are drawn"
    return Figure("partition", "Partition", (heat,), f"{caption}.")


def comparison_figures(groups: Sequence[Group], column: str) -> list[Figure]:
    """Return the figures of a comparison that its runs allow.

    A label has the same color and dash in all of them.

    Args:
        groups: The rows of the comparison.
        column: The column of metrics.csv that it is about.
    """
    metric = base_name(column)
    place_of_label = {group.label: group.place for group in groups}
    groups_of_condition = gathered(groups, lambda group: group.condition)

    courses: list[Chart] = []
    spreads: list[Chart] = []
    for condition, members in groups_of_condition.items():
        prefix = f"{condition}: " if len(groups_of_condition) > 1 else ""

        table = stacked([course_table(group, column, group.label) for group in members], column)
        y = metric_axis("mean", metric, table["mean"])
        title = f"{prefix}{sentence(column)}"
        over_rounds = _over_rounds(table, y, place_of_label, title)
        if over_rounds:
            courses += over_rounds
            courses += _over_costs(table, y, place_of_label, title)

        tested = {}
        for group in members:
            for run in group.runs:
                if metric in run.evaluation:
                    tested[(group.label, run.seed)] = run.evaluation[[metric]]
        if tested:
            clients_table = pd.concat(tested, names=["series", "seed"]).reset_index("series")
            spread = marks.spread(
                clients_table,
                metric_axis(metric, metric, clients_table[metric]),
                Axis("series", "experiment"),
                place_of_label,
                title=f"{prefix}{sentence(metric)} over clients",
            )
            spreads.append(spread)

    course_figure = Figure(
        "comparison",
        f"Learning curves: {readable(column)}",
        tuple(courses),
        f"Lines: {seeds_note(groups) or 'single runs'}. {DRAG}",
    )
    spread_figure = Figure(
        "comparison-clients",
        f"{sentence(metric)} of all clients",
        tuple(spreads),
        f"The clients of all runs of an experiment at their last evaluation. {marks.BOXES}",
    )
    return [figure for figure in (course_figure, spread_figure) if figure.charts]


def seeds_note(groups: Sequence[Group], *, std: bool = False) -> str:
    """Return what is shown of several seeds; empty if every row is one run.

    An example is `mean and 95 % t interval over 5 seeds`.
    """
    counts = sorted(len(group.runs) for group in groups)
    if counts[-1] == 1:
        return ""
    spread = "sample deviation" if std else "95 % t interval"
    return f"mean and {spread} over {ends_text(counts)} seeds"


def _lines(run: Run, columns: Mapping[str, str], metric: str) -> pd.DataFrame:
    """Return a table with a row for each measured round and line.

    Args:
        run: The run.
        columns: The columns of metrics.csv, and the names of their lines.
        metric: The metric that they are of.

    Returns:
        A table with columns `round`, `series`, `value`, `low` and `high`.
    """
    parts = []
    for column, name in columns.items():
        values = run.series(column)
        std = run.series(f"{column}_std")
        part = pd.DataFrame(
            {"value": values, "low": values - std, "high": values + std, "series": name}
        )
        parts.append(part.dropna(subset=["value"]).reset_index(names="round"))
    return stacked(parts, metric)


def _over_rounds(table: pd.DataFrame, y: Axis, places: Places, title: str) -> list[Chart]:
    """Return a chart of lines over rounds; none if there are fewer than two evaluations."""
    if table["round"].nunique() < 2:
        return []
    return [marks.lines(table, Axis("round"), y, places, title=title)]


def _over_costs(table: pd.DataFrame, y: Axis, places: Places, title: str) -> list[Chart]:
    """Return charts of lines over the columns `sent` and `time`; none where one does not vary."""
    charts = []

    sent = table[table["sent"] > 0]
    if sent["sent"].nunique() > 1:
        least = float(sent["sent"].min())
        most = float(sent["sent"].max())
        factor, unit = unit_of(most, "B")
        spans_decades = 20 * least < most
        details = f"{unit}, log" if spans_decades else unit
        x = Axis("sent", f"sent by all clients and the server ({details})", log=spans_decades)
        scaled = sent.assign(sent=sent["sent"] / factor)
        charts.append(marks.lines(scaled, x, y, places, title=f"{title} vs. bytes sent"))

    timed = table[table["time"] > 0]
    if timed["time"].nunique() > 1:
        most = float(timed["time"].max())
        seconds, unit = next(
            (seconds, unit) for smallest, seconds, unit in _TIME_UNITS if most >= smallest
        )
        x = Axis("time", f"virtual time of the clients' devices ({unit})")
        scaled = timed.assign(time=timed["time"] / seconds)
        charts.append(marks.lines(scaled, x, y, places, title=f"{title} vs. virtual time"))

    return charts
