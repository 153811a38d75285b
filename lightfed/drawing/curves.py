"""The course of a run as a picture: metrics, losses, cohorts, and the metric for the bytes sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.style import (
    Theme,
    colour_of,
    curve,
    dress,
    legend_below,
    line_of,
    new_figure,
    share_axis,
    spans_decades,
    whole_ticks,
)
from lightfed.results.columns import OF_CLIENTS, base_name, kind_of
from lightfed.results.outcome import base_names, primary_metric, traffic
from lightfed.results.runfiles import Floats, RunFiles
from lightfed.results.tables import readable, sentence
from lightfed.results.units import is_share, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = {"trained": ":", "aggregated": ":", "finetuned": "-."}

Panel = Callable[["Axes", RunFiles, Theme], None]


def curves_figure(run: RunFiles, theme: Theme) -> Figure | None:
    """Up to nine panels, each of columns measured in two rounds or more; None without any."""
    panels = _panels(run)[:9]
    if not panels:
        return None
    columns = {1: 1, 2: 2, 3: 3, 4: 2}.get(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure({1: 7.0, 2: 9.5, 3: 13.0}[columns], 3.9 * rows, theme, pad=0.13)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        panel(axes, run, theme)
    for axes in grid[len(panels) :]:
        axes.remove()
    return figure


def curve_names(metric: str) -> dict[str, str]:
    """Columns of one metric and what they are called in a legend."""
    return {
        f"global/{metric}": "global",
        f"personal/{metric}": "personal, mean",
        f"personal/{metric}_worst10": "personal, worst 10 %",
        **{f"{kind}/{metric}": f"{name}, mean" for kind, (name, _) in OF_CLIENTS.items()},
    }


def _panels(run: RunFiles) -> list[Panel]:
    primary = base_name(primary_metric(run))
    others = [name for name in base_names(run) if name != primary and "loss" not in name.lower()]
    panels: list[Panel] = []
    if _has_curve(run, *curve_names(primary)):
        panels.append(partial(_metric_panel, metric=primary))
    if _has_curve(run, *_loss_columns(run)):
        panels.append(_loss_panel)
    if len(run.cohorts) > 1 and _has_curve(run, *_cohort_columns(run, primary).values()):
        panels.append(partial(_cohort_panel, metric=primary))
    sent = traffic(run) > 0  # nothing is sent where every client trains alone
    if any((sent & np.isfinite(run.series(name))).sum() > 1 for name in curve_names(primary)):
        panels.append(partial(_traffic_panel, metric=primary))
    panels += [
        partial(_metric_panel, metric=name)
        for name in others
        if _has_curve(run, *curve_names(name))
    ]
    return panels


def _has_curve(run: RunFiles, *columns: str) -> bool:
    return any(np.isfinite(run.series(name)).sum() > 1 for name in columns)


def _metric_panel(axes: Axes, run: RunFiles, theme: Theme, *, metric: str) -> None:
    dress(axes, theme, title=sentence(metric), x_label="round", y_label=readable(metric))
    rounds = run.rounds.astype(np.float64)
    for column, label in curve_names(metric).items():
        _draw(axes, rounds, run.series(column), theme, column=column, label=label)
    mean, std = run.series(f"personal/{metric}"), run.series(f"personal/{metric}_std")
    known = np.isfinite(mean) & np.isfinite(std)
    if known.any():
        low, high = (mean - std)[known], (mean + std)[known]
        label = "personal, \u00b1 std"
        axes.fill_between(
            rounds[known], low, high, color=theme.accent, alpha=0.16, linewidth=0, label=label
        )
    _finish(axes, theme, metric)


def _cohort_panel(axes: Axes, run: RunFiles, theme: Theme, *, metric: str) -> None:
    title = f"Personal {readable(metric)} per cohort"
    dress(axes, theme, title=title, x_label="round", y_label=f"mean {readable(metric)}")
    rounds, cohorts = run.rounds.astype(np.float64), run.cohorts
    for name, column in _cohort_columns(run, metric).items():
        colour, line = colour_of(cohorts.index(name)), line_of(cohorts.index(name))
        curve(axes, rounds, run.series(column), colour=colour, label=name, line=line)
    _finish(axes, theme, metric)


def _loss_panel(axes: Axes, run: RunFiles, theme: Theme) -> None:
    columns = [name for name in _loss_columns(run) if _has_curve(run, name)]
    logarithmic = spans_decades([run.series(name) for name in columns])
    label = "loss (log scale)" if logarithmic else "loss"
    dress(axes, theme, title="Loss", x_label="round", y_label=label)
    rounds = run.rounds.astype(np.float64)
    for name in columns:
        if name == "train_loss":
            curve(axes, rounds, run.series(name), colour=colour_of(0), label="training")
        else:
            label = f"{readable(name)}, test"
            _draw(axes, rounds, run.series(name), theme, column=name, label=label)
    if logarithmic:
        axes.set_yscale("log")
    _finish(axes, theme, "loss")


def _traffic_panel(axes: Axes, run: RunFiles, theme: Theme, *, metric: str) -> None:
    sent = traffic(run)
    factor, unit = unit_of(float(np.nanmax(sent)), "B")
    dress(
        axes,
        theme,
        title=f"{sentence(metric)} for the bytes sent",
        x_label=f"sent by all clients and the server so far ({unit})",
        y_label=readable(metric),
    )
    for column, label in curve_names(metric).items():
        _draw(axes, sent / factor, run.series(column), theme, column=column, label=label)
    axes.set_xlim(left=0)
    _finish(axes, theme, metric, rounds=False)


def _draw(axes: Axes, x: Floats, y: Floats, theme: Theme, *, column: str, label: str) -> None:
    """The global model in ink, what clients hold in the accent, all but plain means broken."""
    if np.isfinite(x + y).any():
        kind = kind_of(column)
        colour = theme.ink if kind in ("global", "local") else theme.accent
        line = "--" if column.endswith("_worst10") or kind == "local" else LINES.get(kind, "-")
        curve(axes, x, y, colour=colour, label=label, line=line)


def _finish(axes: Axes, theme: Theme, metric: str, *, rounds: bool = True) -> None:
    if is_share(metric):
        share_axis(axes.yaxis)
        axes.set_ylim(top=min(1.0, axes.get_ylim()[1]))
    if rounds:
        whole_ticks(axes)
    legend_below(axes, theme)


def _loss_columns(run: RunFiles) -> list[str]:
    losses = [name for name in base_names(run) if "loss" in name.lower()]
    names = [f"{family}/{name}" for name in losses for family in ("global", "personal")]
    return [name for name in ("train_loss", *names) if name in run.metrics]


def _cohort_columns(run: RunFiles, metric: str) -> dict[str, str]:
    names = {name: f"personal/{metric}/{name}" for name in run.cohorts}
    return {name: column for name, column in names.items() if column in run.metrics}
