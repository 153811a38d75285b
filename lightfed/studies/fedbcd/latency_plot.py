"""The picture of the latency analysis: how much shorter a round is when it waits for some servers.

After Wu et al., AAAI 2021, arXiv:2012.13900, eq. (7) and (8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightfed.drawing.style import (
    Theme,
    colour_of,
    curve,
    dress,
    legend_below,
    new_figure,
    share_axis,
)
from lightfed.studies.fedbcd.latency import Latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def latency_figure(title: str, servers: int, found: Sequence[Latency], theme: Theme) -> Figure:
    """Four curves over the share of servers waited for; error bars are two standard errors.

    Args:
        title: what was analysed.
        servers: N.
        found: the analysis for several B.
        theme: for the colours.
    """
    figure = new_figure(7.6, 5.0, theme, pad=0.13)
    axes = figure.subplots()
    label = "servers waited for, B / N"
    title = f"Duration of a round\n{title}"
    dress(axes, theme, title=title, x_label=label, y_label="relative to waiting for all")
    ordered = sorted(found, key=lambda one: one.wait)
    share = np.array([one.wait / servers for one in ordered])
    exact, limit = np.array([(one.ratio, one.asymptotic) for one in ordered]).T
    curve(axes, share, exact, colour=colour_of(0), label="exact")
    curve(axes, share, limit, colour=theme.muted, label="asymptotic (8)", line="--")
    looks: dict[str, dict[str, Any]] = {
        "simulated": {"fmt": "D", "color": theme.ink, "mfc": "none", "markersize": 7, "lw": 0.9},
        "in a run: late servers continue": {
            "fmt": "-s",
            "color": colour_of(1),
            "markersize": 3.5,
            "lw": 1.8,
        },
    }
    estimates = ([one.simulated for one in ordered], [one.in_a_run for one in ordered])
    for (label, look), own in zip(looks.items(), estimates, strict=True):
        value, error = np.array([(one.value, 2 * one.error) for one in own]).T
        axes.errorbar(share, value, error, label=label, capsize=2.5, **look)
    axes.set_xlim(0.0, 1.03)
    axes.set_ylim(bottom=-0.03)
    share_axis(axes.xaxis)
    legend_below(axes, theme)
    return figure
