"""The figures of a single run: its course, its clients, and what each of them holds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Chart, Figure, Series, metric_axis
from lightfed.drawing.tidy import stacked
from lightfed.results.columns import OF_CLIENTS, base_name
from lightfed.results.csvfile import finite
from lightfed.results.outcome import base_names, primary_metric, traffic, worst_tenth
from lightfed.results.run import Run
from lightfed.results.tables import sentence
from lightfed.results.units import metric_text, unit_of

CELLS = 2000  # of a heat map
TIMES = 120  # points of the picture of seconds
MOST_PANELS = 9
DRAG = "Drag to move, Ctrl and wheel to zoom, double click to go back."
# columns of a metric and their names in a legend
LINES = {
    "global/{}": "global",
    "personal/{}": "personal, mean",
    "personal/{}_worst10": "personal, worst 10 %",
    **{f"{kind}/{{}}": f"{name}, mean" for kind, (name, _) in OF_CLIENTS.items()},
    "train_{}": "training",
}


def run_figures(run: Run) -> list[Figure]:
    """Those that the files of the run allow."""
    return [*filter(None, (course(run), clients(run), partition(run), times(run)))]


def course(run: Run) -> Figure | None:
    """Metrics, losses and the metric for the bytes sent; None below two evaluations."""
    primary = base_name(primary_metric(run))
    by = Series.of("series", LINES.values(), "model")
    charts: list[Chart] = []
    for name in dict.fromkeys([primary, "loss", *base_names(run)]):
        table = _lines(run, {column.format(name): text for column, text in LINES.items()}, name)
        charts += _over_rounds(table, name, by, sentence(name))
        if name == primary:
            sent = table.merge(traffic(run).rename("sent"), on="round")
            y = metric_axis("value", name, table["value"])
            charts += over_bytes(sent.drop(columns=["low", "high"]), y, by, sentence(name))
    caption = (
        "Personal: a client's model on its own test samples; the band is one standard deviation "
        f"over the clients. Bytes are those the algorithm sends, for all clients. {DRAG}"
    )
    drawn = tuple(charts[:MOST_PANELS])
    return Figure("curves", "Course of the run", drawn, caption) if drawn else None


def clients(run: Run) -> Figure | None:
    """How the clients fare, by group; None without their evaluation."""
    metric, table = base_name(primary_metric(run)), finite(run.evaluation)
    if metric not in table or table[metric].isna().all():
        return None
    by = Series.of("group", run.client_groups, "client group")
    axis, title = metric_axis(metric, metric, table[metric]), sentence(metric)
    group = Axis("group", "client group", names=run.client_groups)
    charts = [marks.spread(table, axis, group, by, title=f"{title} of each client")]
    groups = _lines(run, {f"personal/{metric}/{name}": name for name in by.places}, metric)
    lines = Series("series", by.places, by.title)
    charts += _over_rounds(groups, metric, lines, f"{title} by client group")
    scores = run.evaluation[metric]
    caption = (
        f"After round {table['round'].iloc[0]}: mean {metric_text(metric, scores.mean())}, "
        f"worst tenth {metric_text(metric, worst_tenth(scores, metric))}, "
        f"{table[metric].count():,} clients{run.note}. {marks.BOXES}"
    )
    return Figure("clients", "Clients: who suffers", tuple(charts), caption)


def partition(run: Run) -> Figure | None:
    """Training samples by class and client; None without a partition."""
    if run.partition is None:
        return None
    counts = run.partition.counts
    held = counts.sum(axis=1)
    most = max(2, min(200, CELLS // counts.shape[1]))
    shown = counts.iloc[marks.evenly_spaced(len(counts), most=most)]
    shown = shown.iloc[:, marks.evenly_spaced(counts.shape[1], most=100)]
    cells = shown.rename_axis(index="client").reset_index()
    heat = marks.heat(
        cells.melt("client", var_name="label", value_name="samples"),
        Axis("client"),
        Axis("label", "class", names=tuple(shown.columns)),
        Axis("samples"),
        title="Training samples by class and client",
    )
    classes = (counts > 0).sum(axis=1)
    ends = " to ".join(dict.fromkeys((str(classes.min()), str(classes.max()))))
    caption = (
        f"{len(counts):,} clients hold {held.min():,} to {held.max():,} samples "
        f"(median {held.median():,.0f}) of {ends} classes; {len(shown)} of them are drawn."
    )
    return Figure("partition", "Partition", (heat,), caption)


def times(run: Run) -> Figure | None:
    """The parts of every round's time, means of neighbours if rounds are many; None below two."""
    rounds = len(run.timings)
    if rounds < 2:
        return None
    bins = np.arange(rounds) * min(TIMES, rounds) // rounds
    means = run.timings.reset_index().groupby(bins).mean()
    table = means.melt("round", var_name="part", value_name="seconds")
    by = Series.of("part", table["part"], "part")
    chart = marks.lines(table, Axis("round"), Axis("seconds", zero=True), by, title="Seconds")
    caption = (
        "Wall-clock seconds of a round, means over the ranks. Merge is what the algorithm does "
        "beside its sessions. Waiting is for other ranks. Checkpoint is what training waits for."
    )
    return Figure("timings", "Time of a round", (chart,), caption)


def over_bytes(table: pd.DataFrame, y: Axis, by: Series, title: str) -> list[Chart]:
    """Lines of y over the column `sent`; none if it does not vary.

    The axis has a unit with short numbers, and is logarithmic over decades.
    """
    table = table[table["sent"] > 0]
    if table["sent"].nunique() < 2:
        return []
    factor, unit = unit_of(float(table["sent"].max()), "B")
    log = bool(20 * table["sent"].min() < table["sent"].max())
    x = Axis("sent", f"sent by all clients and the server ({unit}{', log' * log})", log=log)
    sent = table.assign(sent=table["sent"] / factor)
    return [marks.lines(sent, x, y, by, title=f"{title} for the bytes sent")]


def _lines(run: Run, columns: Mapping[str, str], metric: str) -> pd.DataFrame:
    """A row for each measured round and column: `round`, `series`, `value`, `low`, `high`."""
    parts = []
    for column, name in columns.items():
        values, std = run.series(column), run.series(f"{column}_std")
        own = {"value": values, "low": values - std, "high": values + std, "series": name}
        parts.append(pd.DataFrame(own).dropna(subset=["value"]).reset_index(names="round"))
    return stacked(parts, metric)


def _over_rounds(table: pd.DataFrame, metric: str, by: Series, title: str) -> list[Chart]:
    """A chart of lines; none below two evaluations."""
    y = metric_axis("value", metric, table["value"])
    drawn = table["round"].nunique() > 1
    return [marks.lines(table, Axis("round"), y, by, title=title)] if drawn else []
