"""The picture of a comparison: a metric over rounds and over bytes sent, a line per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from pandas import DataFrame

from lightfed.drawing.style import (
    Theme,
    colour_of,
    curve,
    dress,
    legend_of_all,
    line_of,
    new_figure,
    share_axis,
    spans_decades,
    whole_ticks,
)
from lightfed.results.columns import base_name
from lightfed.results.groups import Group
from lightfed.results.run import Floats
from lightfed.results.tables import readable, sentence
from lightfed.results.units import is_share, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def comparison_figure(groups: Sequence[Group], column: str, theme: Theme) -> Figure | None:
    """Lines of one column of metrics.csv; None unless a row measured it in two rounds."""
    courses = {group.name: group.course(column) for group in groups}
    if all(len(course.index) < 2 for course in courses.values()):
        return None
    known = [course.sent.dropna() for course in courses.values()]
    sent = [float(values.max()) for values in known if len(values) and values.max() > 0]
    figure = new_figure(12.0 if sent else 8.0, 4.9 + 0.05 * len(groups), theme, pad=0.1)
    axes = figure.subplots(1, 2 if sent else 1, sharey=True, squeeze=False).ravel()
    label = readable(base_name(column))
    dress(axes[0], theme, title=sentence(column), x_label="round", y_label=label)
    for place, (name, course) in enumerate(courses.items()):
        _draw(axes[0], course.index.to_numpy(), course, place=place, label=name)
    whole_ticks(axes[0])
    if sent:
        _draw_traffic(axes[1], courses, theme, sent=sent, title=sentence(column))
    if "loss" in column and spans_decades(
        [course["mean"].to_numpy() for course in courses.values()]
    ):
        axes[0].set_yscale("log")
    if is_share(column):
        share_axis(axes[0].yaxis)
        axes[0].set_ylim(top=min(1.0, axes[0].get_ylim()[1]))
    legend_of_all(figure, axes[0], theme)
    return figure


def _draw_traffic(
    axes: Axes, courses: Mapping[str, DataFrame], theme: Theme, *, sent: Sequence[float], title: str
) -> None:
    """The metric against bytes; `sent` is the total of each row."""
    factor, unit = unit_of(max(sent), "B")
    # methods may differ by orders of magnitude in the bytes they send
    logarithmic = max(sent) > 20 * min(sent)
    text = f"sent by all clients and the server so far ({unit}{', log scale' * logarithmic})"
    dress(axes, theme, title=f"{title} for the bytes sent", x_label=text, y_label="")
    for place, (name, course) in enumerate(courses.items()):
        _draw(axes, (course["sent"] / factor).to_numpy(), course, place=place, label=name)
    if logarithmic:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)


def draw_course(
    axes: Axes, x: Floats, course: DataFrame, *, colour: str, line: str, label: str
) -> None:
    """The mean over the runs of a group as a line, with their deviation as a band."""
    curve(axes, x, course["mean"].to_numpy(), colour=colour, label=label, line=line)
    if course["std"].notna().any():
        low, high = course["mean"] - course["std"], course["mean"] + course["std"]
        known = np.isfinite(x)
        axes.fill_between(x[known], low[known], high[known], color=colour, alpha=0.15, linewidth=0)


def _draw(axes: Axes, x: Floats, course: DataFrame, *, place: int, label: str) -> None:
    draw_course(axes, x, course, colour=colour_of(place), line=line_of(place), label=label)
