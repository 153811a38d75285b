"""The panels of a family's pictures: a row for global, one for personal, a column a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightfed.report.groups import synthetic_note
from lightfed.report.levels import Family, Mixture
from lightfed.report.runfiles import Floats
from lightfed.report.style import Theme, dress, new_figure, share_axis
from lightfed.report.tables import readable
from lightfed.report.units import is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

KINDS = ("global", "personal")
LOG_FROM = 8.0  # largest over smallest size from which a log axis tells more
TICKS = 6
MARGIN = 0.07


@dataclass(frozen=True)
class Panel:
    """One pair of axes and what belongs on it.

    Attributes:
        axes: with title and labels, still empty.
        column: of metrics.csv.
        mixtures: those of one division of the data that measured the column.
    """

    axes: Axes
    column: str
    mixtures: tuple[Mixture, ...]


def new_panels(
    family: Family,
    mixtures: Sequence[Mixture],
    theme: Theme,
    *,
    x_label: str,
    height: float,
) -> tuple[Figure, list[Panel]] | None:
    """A figure with the panels that `mixtures` fill; None where none measured the metric."""
    columns = [f"{kind}/{family.metric}" for kind in KINDS]
    having = {c: [m for m in mixtures if np.isfinite(m.score(c)[0])] for c in columns}
    columns = [column for column in columns if having[column]]
    splits = [s for s in family.splits if any(m.split == s for c in columns for m in having[c])]
    if not columns:
        return None
    width = 8.0 if len(splits) == 1 else 6.4 * len(splits)
    figure = new_figure(width, height * len(columns), theme, pad=0.1)
    grid = figure.subplots(len(columns), len(splits), squeeze=False)
    note = synthetic_note(family.mixtures)
    panels = []
    for i, column in enumerate(columns):
        for j, split in enumerate(splits):
            own = tuple(m for m in having[column] if m.split == split)
            if not own:
                grid[i, j].remove()
                continue
            title = f"{family.name}: {readable(column)}{note}\n{split}"
            label = f"final {readable(family.metric)}"
            dress(grid[i, j], theme, title=title, x_label=x_label, y_label=label)
            panels.append(Panel(grid[i, j], column, own))
    return figure, panels


def size_axis(axes: Axes, sizes: Floats) -> None:
    """Relative sizes along x, in per cent; `sizes` are those of all panels, which look alike."""
    low, high = float(sizes.min()), float(sizes.max())
    if high > LOG_FROM * low:
        margin = (high / low) ** MARGIN
        axes.set_xscale("log")
        axes.set_xlim(low / margin, high * margin)
        _log_ticks(axes.xaxis, sizes)
    else:
        axes.set_xlim(low - MARGIN * (high - low), high + MARGIN * (high - low))
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")


def metric_axis(axes: Axes, metric: str, values: Floats) -> None:
    """Shares in per cent; perplexity, which is an exponential, on a log axis."""
    if "perplexity" in metric and values.min() > 0:
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, values)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    elif is_share(metric):
        share_axis(axes.yaxis)
        axes.set_ylim(top=min(1.01, axes.get_ylim()[1]))


def _log_ticks(axis: Axis, values: Floats) -> None:
    """Round numbers with a label, also where the axis is shorter than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    wide = values.max() > LOG_FROM * values.min()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(TICKS))
    axis.set_minor_locator(NullLocator())
