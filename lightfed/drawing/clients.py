"""Picture of the clients at the last evaluation: a row per client group, a point per client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lightfed.drawing.heatmap import evenly_spaced
from lightfed.drawing.style import (
    Theme,
    colour_of,
    dress,
    label_of,
    new_figure,
    share_axis,
    title_and_legend,
)
from lightfed.results.columns import base_name
from lightfed.results.outcome import client_metric, primary_metric, worst_tenth
from lightfed.results.run import Floats, Run
from lightfed.results.tables import readable, sentence
from lightfed.results.units import is_share, metric_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS_SHOWN = 500
BINS = 90
BOX_FROM = 5


def clients_figure(run: Run, theme: Theme) -> Figure | None:
    """The distribution of the clients' metric per group; None without an evaluation of clients."""
    evaluation = run.evaluation
    metric = client_metric(run, base_name(primary_metric(run)))
    if evaluation.empty or metric is None:
        return None
    scores, client_group = evaluation[metric].to_numpy(), evaluation["cohort"].to_numpy()
    measured = np.isfinite(scores)
    groups = {
        name: np.sort(scores[(client_group == name) & measured]) for name in run.client_groups
    }
    groups = {name: values for name, values in groups.items() if len(values)}
    if not groups:
        return None
    figure = new_figure(11.0, 1.7 + 0.62 * len(groups), theme)
    axes = figure.subplots()
    title = f"{sentence(metric)} of each client after round {evaluation['round'].iloc[0]}{run.note}"
    label = f"{readable(metric)} on the client's own test samples"
    dress(axes, theme, title="", x_label=label, y_label="client group")
    axes.grid(axis="y", visible=False)
    low, high = _span(scores[measured])
    axes.set_xlim(low, high)
    for row, (name, values) in enumerate(groups.items()):
        colour = colour_of(run.client_groups.index(name))
        _draw_points(axes, values, row=row, step=(high - low) / BINS, colour=colour)
        _draw_box(axes, values, row=row, theme=theme, colour=colour)
    _draw_levels(axes, scores[measured], metric, theme)
    names = [f"{label_of(name)}  ({len(values):,})" for name, values in groups.items()]
    axes.set_yticks(range(len(groups)), names)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    if is_share(metric):
        share_axis(axes.xaxis)
    title_and_legend(axes, title, theme)
    return figure


def _span(scores: Floats) -> tuple[float, float]:
    """The ends of the axis, with a margin around the scores."""
    low, high = float(scores.min()), float(scores.max())
    margin = 0.04 * (high - low) or 0.05 * max(abs(high), 0.1)
    return low - margin, high + margin


def _draw_points(axes: Axes, values: Floats, *, row: int, step: float, colour: str) -> None:
    """The clients as points, next to each other where they would overlap; a sample if many."""
    shown = values[evenly_spaced(len(values), most=POINTS_SHOWN)]
    cell = np.floor(shown / step).astype(np.int64)
    # golden-ratio steps shuffle the sorted clients of a cell without random numbers
    order = np.lexsort((np.arange(len(shown)) * 0.618034 % 1, cell))
    _, start, count = np.unique(cell[order], return_index=True, return_counts=True)
    rank = np.empty(len(shown), dtype=np.int64)
    rank[order] = np.arange(len(shown)) - np.repeat(start, count)
    # from the middle outwards: 0, 1, -1, 2, -2 ...
    side = np.where(rank % 2 == 1, 1, -1) * ((rank + 1) // 2)
    gap = min(0.11, 0.36 / max(1, count.max() // 2))
    size = 26 if len(shown) <= 60 else 15
    rim = axes.get_facecolor()
    axes.scatter(
        shown, row + gap * side, s=size, color=colour, edgecolors=[rim], linewidths=0.4, zorder=3
    )


def _draw_box(axes: Axes, values: Floats, *, row: int, theme: Theme, colour: str) -> None:
    """The mean; with enough clients also a box of quartiles with 5 % and 95 % whiskers."""
    from matplotlib.colors import to_rgba

    if len(values) >= BOX_FROM:
        line = {"color": colour, "linewidth": 1.1}
        axes.boxplot(
            [values],
            positions=[row],
            orientation="horizontal",
            widths=0.78,
            whis=(5, 95),
            showfliers=False,
            showcaps=False,
            patch_artist=True,
            boxprops={"facecolor": to_rgba(colour, 0.14), "edgecolor": colour, "linewidth": 1.1},
            whiskerprops=line,
            medianprops={"color": theme.ink, "linewidth": 1.6},
            manage_ticks=False,
            zorder=2,
        )
    axes.plot(
        [values.mean()],
        [row],
        "D",
        color=theme.ink,
        fillstyle="none",
        markersize=6,
        zorder=4,
        label="mean of the client group" if row == 0 else None,
    )


def _draw_levels(axes: Axes, scores: Floats, metric: str, theme: Theme) -> None:
    """Two lines across all client groups: the mean of all clients and of their worst tenth."""
    mean, worst = float(scores.mean()), worst_tenth(pd.Series(scores), metric)
    levels = {"mean of all": (mean, "-"), "worst 10 %": (worst, "--")}
    for name, (level, line) in levels.items():
        label = f"{name}: {metric_text(metric, level)}"
        axes.axvline(
            level, color=theme.accent, linewidth=1.2, linestyle=line, zorder=1, label=label
        )
