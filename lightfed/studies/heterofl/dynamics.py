"""A picture of a family of federations: fixed levels against levels redrawn every round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lightfed.drawing.style import Theme, colour_of, label_of, legend_of_all, share_axis
from lightfed.results.units import is_share
from lightfed.studies.heterofl.levels import Family, Mixture
from lightfed.studies.heterofl.panels import Panel, new_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 4  # largest number of pairs of bars
BAR = 0.38  # width, where pairs of bars are 1 apart
HEADROOM = 1.14  # for the numbers over the bars
TURN_FROM = 6  # pairs of bars whose numbers stand upright
# over a bar
NUMBER: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points", "fontsize": 7}
NUMBER |= {"ha": "center", "va": "bottom"}


def dynamic_figure(family: Family, theme: Theme) -> Figure | None:
    """Two bars for each equal pair of levels that was run both ways; None without any."""
    ways = {(_text(m, family), m.split, m.dynamic) for m in family.members}
    pairs = [
        m
        for m in family.members
        if len(m.levels) == 2 and m.even and (_text(m, family), m.split, not m.dynamic) in ways
    ]
    made = new_panels(family, pairs, theme, x_label="two levels of 50 % each", height=3.6)
    if made is None:
        return None
    figure, panels = made
    for panel in panels:
        _draw(panel, theme)
    legend_of_all(figure, panels[0].axes, theme)
    return figure


def _draw(panel: Panel, theme: Theme) -> None:
    family = panel.family
    ordered = sorted(panel.mixtures, key=lambda m: [family.levels.index(n) for n in m.names])
    names = list(dict.fromkeys(_text(mixture, family) for mixture in ordered))
    highest = 0.0
    for dynamic, label in ((False, "fixed level"), (True, "level redrawn every round")):
        own = [mixture for mixture in ordered if mixture.dynamic == dynamic]
        places = np.array([names.index(_text(mixture, family)) for mixture in own])
        scores = np.array([mixture.score(panel.column) for mixture in own]).reshape(-1, 2)
        tops = scores[:, 0] + np.nan_to_num(scores[:, 1])
        highest = max(highest, tops.max(initial=0.0))
        x = places + BAR / 2 * (1 if dynamic else -1)
        panel.axes.bar(x, scores[:, 0], width=BAR, color=colour_of(int(dynamic)), label=label)
        for at, (mean, std), top in zip(x, scores, tops, strict=True):
            if np.isfinite(std):
                panel.axes.errorbar(at, mean, yerr=std, color=theme.ink, elinewidth=0.9)
            text = f"{100 * mean:.1f}" if is_share(panel.column) else f"{mean:.3g}"
            turn = 90 if len(names) >= TURN_FROM else 0
            panel.axes.annotate(text, (at, top), rotation=turn, color=theme.muted, **NUMBER)
    panel.axes.grid(axis="x", visible=False)
    panel.axes.set_xticks(range(len(names)), [label_of(name) for name in names])
    panel.axes.set_xlim(-0.6, max(len(names), FEWEST) - 0.4)
    panel.axes.set_ylim(0, HEADROOM * highest)
    if is_share(family.metric):
        share_axis(panel.axes.yaxis)


def _text(mixture: Mixture, family: Family) -> str:
    """The pair of levels, and how it differs from the same pair elsewhere."""
    other = mixture.algorithm if mixture.algorithm != family.algorithm else ""
    return ", ".join(part for part in (mixture.combination, other, mixture.variant) if part)
