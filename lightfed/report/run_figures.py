"""The figures of a single run: its course, its clients, and what each of them holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Chart, Figure, Series, metric_axis
from lightfed.drawing.tidy import stacked
from lightfed.results.columns import OF_CLIENTS, base_name
from lightfed.results.csvfile import finite
from lightfed.results.outcome import base_names, client_metric, primary_metric, traffic, worst_tenth
from lightfed.results.run import Run
from lightfed.results.tables import readable, sentence
from lightfed.results.units import metric_text, unit_of

DOTS = 250  # clients in a picture of points
CELLS = 2000  # of a heat map
TIMES = 120  # points of the picture of seconds
MOST_PANELS = 9
# by the column of clients.csv: the quantity and its unit
BESIDE = {
    "samples": ("training samples", ""),
    "parameters": ("parameters of the client's model", ""),
    "bytes": ("sent by the client, up and down", "B"),
    "flops": ("computed by the client", "FLOPs"),
    "stored_bytes": ("kept by the client", "B"),
}
SENT = ("sent by all clients and the server", "B")
TRAINING = "training"
DRAG = "Drag to move, Ctrl and wheel to zoom, double click to go back."


def run_figures(run: Run) -> list[Figure]:
    """Those that the files of the run allow."""
    return [*filter(None, (course(run), clients(run), partition(run), times(run)))]


def course(run: Run) -> Figure | None:
    """Metrics, losses and the metric for the bytes sent; None below two evaluations."""
    primary, every = base_name(primary_metric(run)), base_names(run)
    losses = [name for name in every if "loss" in name.lower()]
    others = [name for name in every if name != primary and name not in losses]
    kinds = _kinds(primary)
    by = Series.of("series", [*kinds.values(), TRAINING], "model")
    by_round = _lines(run, kinds, primary)
    by_bytes = by_round.merge(traffic(run).rename("sent"), on="round").drop(columns=["low", "high"])
    y = metric_axis("value", primary, by_round["value"])
    title = f"{sentence(primary)} for the bytes sent"
    loss = {"train_loss": TRAINING}
    for name in losses:
        loss |= {f"global/{name}": "global", f"personal/{name}": "personal, mean"}
    charts = [
        *_against_rounds(by_round, primary, by),
        *_against_rounds(_lines(run, loss, "loss"), "loss", by),
        *against(by_bytes[by_bytes["sent"] > 0], "sent", SENT, y, by, marks.lines, title),
    ]
    for name in others:
        charts += _against_rounds(_lines(run, _kinds(name), name), name, by)
    caption = (
        "Personal: a client's model on its own test samples; the band is one standard deviation "
        "over the clients. Bytes are those the algorithm sends, for all clients. " + DRAG
    )
    drawn = tuple(charts[:MOST_PANELS])
    return Figure("curves", "Course of the run", drawn, caption) if drawn else None


def clients(run: Run) -> Figure | None:
    """How the clients fare, by group, data, model and cost; None without their evaluation."""
    metric = client_metric(run, base_name(primary_metric(run)))
    table = finite(run.evaluation)
    if metric is None or metric not in table or not table[metric].notna().any():
        return None
    by = Series.of("group", run.client_groups, "client group")
    axis = metric_axis(metric, metric, table[metric])
    group = Axis("group", "client group", names=run.client_groups)
    title = sentence(metric)
    charts = [marks.spread(table, axis, group, by, title=f"{title} of each client")]
    columns = {f"personal/{metric}/{name}": name for name in run.client_groups}
    if len(columns) > 1:
        groups = _lines(run, columns, metric).rename(columns={"series": "group"})
        charts += _against_rounds(groups, metric, by, f"{title} by client group")
    beside = _beside(run)
    for name, quantity in BESIDE.items():
        if name in beside:
            heading = f"{title} and {readable(name)}"
            charts += against(beside, name, quantity, axis, by, marks.points, heading)
    scores = run.evaluation[metric]
    worst = metric_text(metric, worst_tenth(scores, metric))
    mean = metric_text(metric, float(scores.mean()))
    caption = (
        f"After round {int(table['round'].iloc[0])}: mean {mean}, worst tenth {worst}, "
        f"{table[metric].count():,} clients{run.note}. Boxes: quartiles; lines: 5 % to 95 %; bars: "
        "median (thick) and mean (thin)."
    )
    if len(table) > DOTS:
        most = f"{marks.MOST_SHOWN:,} in all, and {DOTS} in the other pictures"
        caption += f" Clients of evenly spaced ranks are drawn: {most}."
    return Figure("clients", "Clients: who suffers", tuple(charts), caption)


def partition(run: Run) -> Figure | None:
    """Training samples by class and client; None without a partition."""
    if run.partition is None or not run.partition.counts.to_numpy().any():
        return None
    counts = run.partition.counts
    held = counts.sum(axis=1).sort_values(ascending=False)
    most = max(2, min(200, CELLS // max(1, counts.shape[1])))
    shown = counts.iloc[marks.evenly_spaced(len(counts), most=most)]
    shown = shown.iloc[:, marks.evenly_spaced(counts.shape[1], most=100)]
    cells = shown.rename_axis(index="client").reset_index()
    names = tuple(map(str, shown.columns))
    heat = marks.heat(
        cells.melt("client", var_name="label", value_name="samples"),
        Axis("client"),
        Axis("label", "class", names=names),
        Axis("samples"),
        title="Training samples by class and client",
    )
    ranks = marks.evenly_spaced(len(held), most=200)
    sizes = pd.DataFrame({"rank": ranks + 1, "samples": held.to_numpy()[ranks], "of": "clients"})
    x, y = Axis("rank", "clients, by their samples"), Axis("samples", zero=True)
    by = Series.of("of", ["clients"])
    ordered = marks.lines(sizes, x, y, by, title="Training samples of each client")
    classes = (counts > 0).sum(axis=1)
    ends = " to ".join(dict.fromkeys((str(classes.min()), str(classes.max()))))
    caption = (
        f"{len(counts):,} clients hold {held.iloc[-1]:,} to {held.iloc[0]:,} samples "
        f"(median {held.median():,.0f}) of {ends} classes."
    )
    if len(shown) < len(counts):
        caption += f" {len(shown)} of them are drawn."
    return Figure("partition", "Partition", (heat, ordered), caption)


def times(run: Run) -> Figure | None:
    """The parts of every round's time; None below two rounds."""
    if len(run.timings) < 2:
        return None
    bins = np.arange(len(run.timings)) * min(TIMES, len(run.timings)) // len(run.timings)
    means = run.timings.reset_index().groupby(bins).mean()
    parts = [name for name in means.columns[1:] if means[name].any()]
    table = means.melt("round", parts, var_name="part", value_name="seconds")
    by = Series.of("part", parts, "part")
    chart = marks.areas(table, Axis("round"), Axis("seconds", zero=True), by, title="Seconds")
    caption = (
        "Wall-clock seconds of a round, means over the ranks. Merge is what the algorithm does "
        "beside its sessions. Waiting is for other ranks. Checkpoint is what training waits for."
    )
    return Figure("timings", "Time of a round", (chart,), caption)


def _kinds(metric: str) -> dict[str, str]:
    """Columns of one metric and their names in a legend."""
    return {
        f"global/{metric}": "global",
        f"personal/{metric}": "personal, mean",
        f"personal/{metric}_worst10": "personal, worst 10 %",
        **{f"{kind}/{metric}": f"{name}, mean" for kind, (name, _) in OF_CLIENTS.items()},
    }


def _lines(run: Run, columns: Mapping[str, str], metric: str) -> pd.DataFrame:
    """A row for each measured round and column: `round`, `series`, `value`, `low`, `high`."""
    parts = []
    for column, name in columns.items():
        values = run.series(column).dropna()
        std = run.series(f"{column}_std").reindex(values.index)
        own = {"value": values, "low": values - std, "high": values + std, "series": name}
        parts.append(pd.DataFrame(own).rename_axis("round").reset_index())
    return stacked(parts, metric)


def _against_rounds(table: pd.DataFrame, metric: str, by: Series, title: str = "") -> list[Chart]:
    """A chart of lines; none below two evaluations."""
    if table["round"].nunique() < 2:
        return []
    y = metric_axis("value", metric, table["value"])
    return [marks.lines(table, Axis("round"), y, by, title=title or sentence(metric))]


def against(
    table: pd.DataFrame,
    column: str,
    quantity: tuple[str, str],
    y: Axis,
    by: Series,
    draw: Callable[..., Chart],
    title: str,
) -> list[Chart]:
    """A chart of y against a column, a quantity with its unit; none if rows do not differ in it.

    The axis has a unit with short numbers, and is logarithmic over decades.
    """
    known = table.dropna(subset=[column])
    values = known[column]
    if values.nunique() < 2:
        return []
    said, unit = quantity
    factor, name = unit_of(float(values.max()), unit) if unit else (1.0, "")
    log = bool(0 < 20 * values.min() < values.max())
    words = [name] * bool(name) + ["log"] * log
    x = Axis(column, f"{said} ({', '.join(words)})" if words else said, log=log)
    return [draw(known.assign(**{column: values / factor}), x, y, by, title=title)]


def _beside(run: Run) -> pd.DataFrame:
    """The clients with what they hold and spend, a sample of them if they are many."""
    table = finite(run.evaluation)
    table = table.iloc[marks.evenly_spaced(len(table), most=DOTS)]
    sizes = table["group"].map(run.environment.get("parameters", {})).astype(float)
    sent = table.reindex(columns=["bytes_up", "bytes_down"]).sum(axis=1, min_count=1)
    held = np.nan if run.partition is None else run.partition.counts.sum(axis=1)
    return table.assign(samples=held, parameters=sizes, bytes=sent)
