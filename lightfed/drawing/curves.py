"""Curves of a run: metrics, losses, client groups, and the metric against bytes sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from lightfed.results.run import Run
from lightfed.results.tables import readable, sentence
from lightfed.results.units import is_share, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = {"trained": ":", "aggregated": ":", "finetuned": "-."}


@dataclass(frozen=True)
class Panel:
    """Columns of one metric.

    Attributes:
        title: above the axes.
        metric: gives the unit.
        labels: of the columns, for the legend.
        client_groups: whether each column is of one client group and has its colour.
        sent: draw the columns against bytes sent instead of rounds.
    """

    title: str
    metric: str
    labels: Mapping[str, str]
    client_groups: bool = False
    sent: bool = False


def curves_figure(run: Run, theme: Theme) -> Figure | None:
    """Up to nine panels with columns measured in at least two rounds; None without any."""
    panels = [panel for panel in _panels(run) if _has_curve(run, panel)][:9]
    if not panels:
        return None
    columns = {1: 1, 2: 2, 3: 3, 4: 2}.get(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure({1: 7.0, 2: 9.5, 3: 13.0}[columns], 3.9 * rows, theme, pad=0.13)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, run, panel, theme)
    for axes in grid[len(panels) :]:
        axes.remove()
    return figure


def curve_names(metric: str) -> dict[str, str]:
    """Columns of one metric and their names in a legend."""
    return {
        f"global/{metric}": "global",
        f"personal/{metric}": "personal, mean",
        f"personal/{metric}_worst10": "personal, worst 10 %",
        **{f"{kind}/{metric}": f"{name}, mean" for kind, (name, _) in OF_CLIENTS.items()},
    }


def _panels(run: Run) -> list[Panel]:
    """All possible panels, most important first."""
    primary, every = base_name(primary_metric(run)), base_names(run)
    losses = [name for name in every if "loss" in name.lower()]
    of_losses = [f"{kind}/{name}" for name in losses for kind in ("global", "personal")]
    loss = {"train_loss": "training"} | {name: f"{readable(name)}, test" for name in of_losses}
    client_groups = {f"personal/{primary}/{name}": name for name in run.client_groups}
    title, by_client_group = sentence(primary), f"Personal {readable(primary)} per client group"
    names = curve_names(primary)
    return [
        Panel(title, primary, names),
        Panel("Loss", "loss", {name: text for name, text in loss.items() if _measured(run, name)}),
        *(
            [Panel(by_client_group, primary, client_groups, client_groups=True)]
            if len(client_groups) > 1
            else []
        ),
        Panel(f"{title} for the bytes sent", primary, names, sent=True),
        *(
            Panel(sentence(name), name, curve_names(name))
            for name in every
            if name != primary and name not in losses
        ),
    ]


def _has_curve(run: Run, panel: Panel) -> bool:
    """Whether a column has two points; standalone clients send nothing."""
    at = traffic(run) > 0 if panel.sent else np.ones(len(run.rounds), dtype=np.bool_)
    return any((at & np.isfinite(run.series(name))).sum() > 1 for name in panel.labels)


def _measured(run: Run, column: str) -> bool:
    return int(np.isfinite(run.series(column)).sum()) > 1


def _draw(axes: Axes, run: Run, panel: Panel, theme: Theme) -> None:
    x, x_label = run.rounds.index.to_series(), "round"
    if panel.sent:
        factor, unit = unit_of(float(np.nanmax(traffic(run))), "B")
        x, x_label = traffic(run) / factor, f"sent by all clients and the server so far ({unit})"
    of_loss = panel.metric == "loss"
    logarithmic = of_loss and spans_decades([run.series(name).to_numpy() for name in panel.labels])
    y_label = "mean " * panel.client_groups + readable(panel.metric) + " (log scale)" * logarithmic
    dress(axes, theme, title=panel.title, x_label=x_label, y_label=y_label)
    for place, (column, label) in enumerate(panel.labels.items()):
        y = run.series(column)
        if np.isfinite(x + y).any():
            looks = (
                (colour_of(place), line_of(place)) if panel.client_groups else _look(column, theme)
            )
            curve(axes, x.to_numpy(), y.to_numpy(), colour=looks[0], label=label, line=looks[1])
    if not (panel.sent or panel.client_groups or of_loss):
        _draw_band(axes, run, panel.metric, theme)
    if logarithmic:
        axes.set_yscale("log")
    if is_share(panel.metric):
        share_axis(axes.yaxis)
        axes.set_ylim(top=min(1.0, axes.get_ylim()[1]))
    if panel.sent:
        axes.set_xlim(left=0)
    else:
        whole_ticks(axes)
    legend_below(axes, theme)


def _draw_band(axes: Axes, run: Run, metric: str, theme: Theme) -> None:
    """The deviation of the personal metric over the clients."""
    mean, std = run.series(f"personal/{metric}"), run.series(f"personal/{metric}_std")
    known = np.isfinite(mean) & np.isfinite(std)
    if known.any():
        x, low, high = run.rounds.index[known], mean - std, mean + std
        band = axes.fill_between(x, low[known], high[known], color=theme.accent, alpha=0.16)
        band.set(linewidth=0, label="personal, \u00b1 std")


def _look(column: str, theme: Theme) -> tuple[str, str]:
    """Colour and line: the global model in ink, clients' models in accent; solid for means only."""
    kind = kind_of(column)
    if kind == "train_loss":
        return colour_of(0), "-"
    colour = theme.ink if kind in ("global", "local") else theme.accent
    broken = column.endswith("_worst10") or kind == "local"
    return colour, "--" if broken else LINES.get(kind, "-")
