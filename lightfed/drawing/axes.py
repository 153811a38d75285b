"""Axes of sizes and of metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightfed.drawing.style import share_axis
from lightfed.results.run import Floats
from lightfed.results.units import is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

LOG_FROM = 8.0  # ratio of largest to smallest size above which an axis is logarithmic
TICKS = 6
MARGIN = 0.07


def size_axis(axes: Axes, sizes: Floats) -> None:
    """Relative sizes along x, in per cent; `sizes` are those of all panels, to give equal axes."""
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
    """Label round numbers, even if the axis is shorter than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    wide = values.max() > LOG_FROM * values.min()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(TICKS))
    axis.set_minor_locator(NullLocator())
