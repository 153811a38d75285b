"""Pictures of a family of federations: the metric against the mean size of a client's model.

One has a point per combination of levels. The other has a line per pair of levels, with the share
of one level growing from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.axes import metric_axis, size_axis
from lightfed.drawing.style import LINES, Theme, colour_of, label_of, legend_of_all
from lightfed.results.settings import gathered
from lightfed.results.units import count_text
from lightfed.studies.heterofl.labels import place_labels
from lightfed.studies.heterofl.levels import Family, Mixture
from lightfed.studies.heterofl.panels import Panel, new_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_FROM = 3  # shares of a pair of levels, including 0 and 1, that make a line
SIDE, SMALL_SIDE = 6.0, 3.5  # of a mark, in points


def combinations_figure(family: Family, theme: Theme) -> Figure | None:
    """A point for each combination of levels; None unless two of them differ in size.

    Unequal shares of a pair are left out if a line shows them.
    """
    on_lines = [m for line in pair_lines(family) for m in line.mixtures if not m.even]
    drawn = [mixture for mixture in family.members if mixture not in on_lines]
    if len({mixture.size for mixture in drawn}) < 2:
        return None
    made = new_panels(family, drawn, theme, x_label=_size_label(family), height=4.6)
    if made is None:
        return None
    figure, panels = made
    for panel in panels:
        _line(panel, _alone(panel), colour=theme.muted, dashes=":")
        for mixture in panel.mixtures:
            _mark(panel, mixture, colour=_colour(mixture, family, theme), side=SIDE)
        _scale(panel, drawn)
    _explain(panels[0].axes, family, drawn, theme)
    legend_of_all(figure, panels[0].axes, theme)
    figure.draw_without_rendering()  # fixes the layout, on which the labels depend
    for panel in panels:
        texts = {mixture: _text(mixture, family) for mixture in panel.mixtures}
        fixed = {text for mixture, text in texts.items() if not mixture.dynamic}
        named = {m: text for m, text in texts.items() if not m.dynamic or text not in fixed}
        _name(figure, panel, named, [_alone(panel)], theme)
    return figure


def shares_figure(family: Family, theme: Theme) -> Figure | None:
    """A line for each pair of levels that was mixed in unequal shares; None without any."""
    found = pair_lines(family)
    drawn = list(dict.fromkeys(mixture for line in found for mixture in line.mixtures))
    made = new_panels(family, drawn, theme, x_label=_size_label(family), height=4.2)
    if made is None:
        return None
    figure, panels = made
    for panel in panels:
        for line in found:
            colour, dashes = _look(line, family)
            own = line.within(panel)
            _line(panel, own, colour=colour, dashes=dashes)
            for mixture in own:
                _mark(panel, mixture, colour=colour, side=SMALL_SIDE)
        _scale(panel, drawn)
    looks = {line.label: _look(line, family) for line in found}
    for label, (colour, dashes) in looks.items():
        panels[0].axes.plot([], [], dashes, color=colour, label=label_of(label), linewidth=1.6)
    legend_of_all(figure, panels[0].axes, theme)
    figure.draw_without_rendering()
    for panel in panels:
        ends = {m: m.combination for m in panel.mixtures if len(m.levels) == 1}
        _name(figure, panel, ends, [line.within(panel) for line in found], theme)
    return figure


@dataclass(frozen=True)
class PairLine:
    """Two levels in several shares.

    Attributes:
        names: of the wide and the narrow level.
        label: the pair, and how it differs from the same pair elsewhere.
        mixtures: by size; the ends, with one level only, may be missing.
    """

    names: tuple[str, str]
    label: str
    mixtures: tuple[Mixture, ...]

    def within(self, panel: Panel) -> list[Mixture]:
        return [mixture for mixture in self.mixtures if mixture in panel.mixtures]


def pair_lines(family: Family) -> list[PairLine]:
    """The pairs of levels that were mixed in unequal shares, for every partition."""
    pairs = gathered(
        (mixture for mixture in family.members if len(mixture.levels) == 2),
        lambda m: (m.names, (m.split, m.algorithm, m.variant), m.dynamic),
    )
    found = []
    for ((wide, narrow), setting, dynamic), mixed in pairs.items():
        ends = [
            m
            for m in family.members
            if m.names in ((wide,), (narrow,)) and (m.split, m.algorithm, m.variant) == setting
        ]
        every = sorted([*mixed, *ends], key=lambda m: m.size)
        if len({m.size for m in every}) >= LINE_FROM and not all(m.even for m in mixed):
            _, algorithm, variant = setting
            other = algorithm if algorithm != family.algorithm else ""
            parts = (f"{wide}-{narrow}", other, variant, "dynamic" * dynamic)
            label = ", ".join(part for part in parts if part)
            found.append(PairLine((wide, narrow), label, tuple(every)))
    return sorted(found, key=lambda line: [family.levels.index(name) for name in line.names])


def _is_alone(mixture: Mixture, family: Family) -> bool:
    """Whether all clients have one width, and nothing else is special."""
    return (
        len(mixture.levels) == 1
        and mixture.algorithm == family.algorithm
        and not (mixture.variant or mixture.dynamic)
    )


def _alone(panel: Panel) -> list[Mixture]:
    return [mixture for mixture in panel.mixtures if _is_alone(mixture, panel.family)]


def _size_label(family: Family) -> str:
    largest = family.largest
    size = f"{largest.name}: {count_text(largest.parameters)} parameters"
    return f"average size of the clients' models, relative to the largest ({size})"


def _text(mixture: Mixture, family: Family) -> str:
    other = f"{mixture.algorithm} " if mixture.algorithm != family.algorithm else ""
    return f"{other}{mixture.combination}" + (f", {mixture.variant}" if mixture.variant else "")


def _colour(mixture: Mixture, family: Family, theme: Theme) -> str:
    """The colour of the widest level; the ink of the page for another algorithm."""
    if mixture.algorithm != family.algorithm:
        return theme.ink
    return colour_of(family.place(mixture.names[0]))


def _look(line: PairLine, family: Family) -> tuple[str, str]:
    """Colour by the wide level, dashes by the distance to the narrow one."""
    wide, narrow = (family.place(name) for name in line.names)
    return colour_of(wide), LINES[(narrow - wide - 1) % len(LINES)]


def _line(panel: Panel, mixtures: Sequence[Mixture], *, colour: str, dashes: str) -> None:
    x, y, _ = panel.points(mixtures).T
    panel.axes.plot(x, y, dashes, color=colour, linewidth=1.2, zorder=1)


def _mark(panel: Panel, mixture: Mixture, *, colour: str, side: float) -> None:
    """Hollow for dynamic levels; a diamond for another algorithm; a bar for the std."""
    x, y, std = panel.points([mixture]).T
    panel.axes.errorbar(
        x,
        y,
        yerr=std if np.isfinite(std).all() else None,
        fmt="o" if mixture.algorithm == panel.family.algorithm else "D",
        color=colour,
        markersize=side,
        markerfacecolor=panel.axes.get_facecolor() if mixture.dynamic else colour,
        elinewidth=0.9,
        zorder=3,
    )


def _scale(panel: Panel, drawn: Sequence[Mixture]) -> None:
    panel.axes.margins(y=0.1)
    size_axis(panel.axes, panel.points(drawn)[:, 0])
    metric_axis(panel.axes, panel.family.metric, panel.points(panel.mixtures)[:, 1])


def _explain(axes: Axes, family: Family, drawn: Sequence[Mixture], theme: Theme) -> None:
    """Entries of the legend that apply."""
    main = [mixture for mixture in drawn if mixture.algorithm == family.algorithm]
    widest = {mixture.names[0] for mixture in main}
    marks = {
        f"widest level {name}": ("o", colour_of(family.place(name)))
        for name in family.levels
        if name in widest
    }
    if len(main) < len(drawn):
        marks[f"not {family.algorithm}"] = ("D", theme.ink)
    for label, (mark, colour) in marks.items():
        axes.plot([], [], mark, color=colour, markersize=SIDE, label=label_of(label))
    if any(mixture.dynamic for mixture in drawn):
        label, hollow = "levels redrawn every round", axes.get_facecolor()
        axes.plot([], [], "o", color=theme.ink, markersize=SIDE, mfc=hollow, label=label)
    if sum(_is_alone(mixture, family) for mixture in drawn) > 1:
        axes.plot([], [], ":", color=theme.muted, linewidth=1.2, label="one level for all clients")


def _name(
    figure: Figure,
    panel: Panel,
    texts: Mapping[Mixture, str],
    lines: Sequence[Sequence[Mixture]],
    theme: Theme,
) -> None:
    """Label some mixtures next to their points without covering points and lines."""
    labels = [(*panel.points([mixture])[0, :2].tolist(), text) for mixture, text in texts.items()]
    marks = panel.points(panel.mixtures)[:, :2]
    drawn = [panel.points(line)[:, :2] for line in lines]
    place_labels(figure, panel.axes, labels, theme, marks=marks, lines=drawn)
