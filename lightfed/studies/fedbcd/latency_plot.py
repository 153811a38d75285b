"""The picture of the latency analysis: how much shorter a round is when it waits for some servers.

After Wu et al., AAAI 2021, arXiv:2012.13900, eq. (7) and (8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightfed.drawing.style import (
    Theme,
    colour_of,
    curve,
    dress,
    legend_below,
    new_figure,
    share_axis,
)
from lightfed.results.runfiles import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LatencyCurves:
    """Durations of a round relative to one that waits for all servers, each (W,).

    Attributes:
        title: what was analysed.
        share: B / N, servers waited for.
        exact: by integration.
        simulated: by simulation of independent rounds, with `simulated_error`.
        asymptotic: NaN where there is none.
        in_a_run: where late servers go on, with `in_a_run_error`.
    """

    title: str
    share: Floats
    exact: Floats
    simulated: Floats
    simulated_error: Floats
    asymptotic: Floats
    in_a_run: Floats
    in_a_run_error: Floats


def latency_figure(curves: LatencyCurves, theme: Theme) -> Figure:
    """Four curves over the share of servers that are waited for; bars of two standard errors."""
    figure = new_figure(7.6, 5.0, theme, pad=0.13)
    axes = figure.subplots()
    dress(
        axes,
        theme,
        title=f"Duration of a round\n{curves.title}",
        x_label="servers that are waited for, B / N",
        y_label="relative to waiting for all",
    )
    curve(axes, curves.share, curves.exact, colour=colour_of(0), label="exact")
    curve(
        axes, curves.share, curves.asymptotic, colour=theme.muted, label="asymptotic (8)", line="--"
    )
    axes.errorbar(
        curves.share,
        curves.simulated,
        yerr=2 * curves.simulated_error,
        fmt="D",
        color=theme.ink,
        markerfacecolor="none",
        markersize=7,
        elinewidth=0.9,
        capsize=2.5,
        label="simulated",
    )
    axes.errorbar(
        curves.share,
        curves.in_a_run,
        yerr=2 * curves.in_a_run_error,
        fmt="-s",
        color=colour_of(1),
        markersize=3.5,
        linewidth=1.8,
        capsize=2.5,
        label="in a run: late ones go on",
    )
    axes.set_xlim(0.0, 1.03)
    axes.set_ylim(bottom=-0.03)
    share_axis(axes.xaxis)
    legend_below(axes, theme)
    return figure
