"""Charts in Vega-Lite from tables: lines with bands, points with error bars, spreads, heat maps.

A table has a row for each mark. If it has columns `low` and `high`, they are the ends of an
interval. The page adds what answers to a pointer.

A specification is written here as the mappings that Vega-Lite reads, with keys in alphabetical
order: every run draws its page, and a library that builds such mappings takes half a second to
import. The tests hold them against Vega-Lite's schema.

A chart names its colors (`theme:ink`, `theme:c0`), and `coloured` replaces the names by the colors
of a scheme of templates/theme.json, light or dark. The colors of series have a contrast of at least
3:1 with the background, and texts one of at least 4.5:1 (WCAG 2.2 AA). They were chosen for the
largest distance in OKLab under normal vision and the three color vision deficiencies of Machado et
al., "A Physiologically-based Model for Simulation of Color Vision Deficiency", TVCG 2009. Dashes
tell series apart where colors repeat or are printed in gray.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from lightfed.lab.results.groups import Group
from lightfed.lab.results.run import Run
from lightfed.lab.results.text import is_share, readable

THEME = json.loads((files("lightfed.lab.drawing") / "templates" / "theme.json").read_text("utf-8"))

# The ratio of the largest to the smallest value from which a loss has a logarithmic axis.
DECADES = 50

# The format of shares on axes, which is precise enough for the numbers at a mark.
SHARE = ".4~%"

# The margin of an axis beside its values, as a part of their range.
MARGIN = 0.04

# At most so many points of a line, members of a group, and rows and columns of a heat map are
# drawn. If there are more, a selection is drawn that is evenly spaced.
MOST_ROUNDS = 150
MOST_SHOWN = 300
MOST_CELLS = 40

# With at most so many points, those of a line are marked and others can have names.
FEW = 15

# A longer name has no room beside a point, in characters.
LONG = 22

# Pixels of a chart, and of a row of cells.
HEIGHT = 250
ROW = 24

BOXES = (
    "Each point is a client. With many clients, only an evenly spaced selection is drawn. A box "
    "shows the quartiles and the median; its whiskers are at most 1.5 boxes long."
)

# Gives a value for each round of a run.
Along = Callable[[Run], "pd.Series[float]"]

# For each series, which color and dash it has wherever it is drawn.
Places = Mapping[str, int]

# A mapping of Vega-Lite.
Spec = dict[str, Any]

# What tells readers of a specification that it is Vega-Lite's, and of which version.
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.4.1.json"


@dataclass(frozen=True)
class Axis:
    """How a column of a table is shown.

    Attributes:
        column: The name of the column.
        title: The title of the axis and in tables; by default the name of the column in words.
        format: The format of numbers, in d3's language.
        log: Whether the axis is logarithmic.
        zero: Whether it begins at zero.
        ends: The ends of the axis; by default they are chosen from the values.
    """

    column: str
    title: str = ""
    format: str = ""
    log: bool = False
    zero: bool = False
    ends: tuple[float, float] | None = None

    @property
    def heading(self) -> str:
        """The title, or else the name of the column in words."""
        return self.title or readable(self.column)


SERIES = Axis("series")


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: The title above it.
        spec: The specification in Vega-Lite, without data, width and configuration; colors have
            names.
        data: What it shows, with the columns that the specification names.
        columns: The columns shown in the table below the chart, in order, with their headings and
            formats.
        places: The places of the series that it draws, by name; readers can switch these off.
    """

    title: str
    spec: Spec
    data: pd.DataFrame
    columns: Mapping[str, Axis]
    places: Places

    @property
    def values(self) -> dict[str, Any]:
        """The data as `columns` and rows of `data`; numbers have five digits."""
        short = self.data.map(lambda x: float(f"{x:.5g}") if isinstance(x, float) else x)
        text = short.to_json(orient="split", index=False, double_precision=15)
        values: dict[str, Any] = json.loads(text)
        return values

    @property
    def table(self) -> pd.DataFrame:
        """The numbers that readers see."""
        headings = [axis.heading for axis in self.columns.values()]
        names = []
        for column, heading in zip(self.columns, headings, strict=True):
            is_unique = headings.count(heading) == 1
            names.append(heading if is_unique else f"{heading} {column}")
        return self.data[list(self.columns)].set_axis(names, axis=1)


@dataclass(frozen=True)
class Figure:
    """Charts that belong together.

    Attributes:
        name: The name of its files.
        title: The title above the charts.
        charts: The charts.
        caption: How to read them.
    """

    name: str
    title: str
    charts: tuple[Chart, ...]
    caption: str = ""

    @property
    def series(self) -> dict[str, int]:
        """The series drawn in any of its charts and their places, for one legend."""
        place_of_series: dict[str, int] = {}
        for chart in self.charts:
            place_of_series |= chart.places
        return place_of_series

    @property
    def table(self) -> pd.DataFrame:
        """The numbers of all its charts."""
        tables = {chart.title: chart.table for chart in self.charts}
        return pd.concat(tables, names=["chart"]).reset_index("chart")


def lines(table: pd.DataFrame, x: Axis, y: Axis, places: Places, *, title: str = "") -> Chart:
    """Return a chart with a line for each series through its measured points.

    Args:
        table: A row for each point. A line has a band from `low` to `high`, if there are these
            columns.
        x: The horizontal axis.
        y: The vertical axis.
        places: The places of the series.
        title: The title; by default the heading of the vertical axis.
    """
    data = _thinned(_by_role(table, x=x, y=y, series=SERIES), "series", MOST_ROUNDS)
    are_few = data.empty or data["series"].value_counts().max() <= FEW
    places = _drawn(places, data)

    color = _colour(places, data, "stroke")
    # Without a title, dashes are shown in the legend of the colors.
    dash = {
        "field": "series",
        "scale": _scale(places, dash_of),
        "title": None,
        "type": "nominal",
    }
    across = _position("x", data, x)
    mark = {"type": "line", "point": {"opacity": 1 if are_few else 0, "size": 40}}
    layers = [
        _layer(mark, color=color, strokeDash=dash, x=across, y=_position("y", data, y)),
    ]
    if "low" in data:
        low = _position("y", data, y, field="low")
        band = {"type": "area", "opacity": 0.16}
        layers.insert(0, _layer(band, color=color, x=across, y=low, y2={"field": "high"}))
    return _chart(title or y.heading, data, layers, places, {"x": x, "y": y})


def points(
    table: pd.DataFrame, x: Axis, y: Axis, places: Places, *, name: str = "", title: str = ""
) -> Chart:
    """Return a chart with a point for each row.

    Args:
        table: A row for each point. It has an error bar from `low` to `high`, if there are these
            columns.
        x: The horizontal axis.
        y: The vertical axis.
        places: The places of the series.
        name: The column with the names of the points. They stand beside them if they are few and
            short.
        title: The title; by default the heading of the vertical axis.
    """
    name_axis = {"name": Axis(name)} if name else {}
    data = _by_role(table, x=x, y=y, series=SERIES, **name_axis)
    places = _drawn(places, data)

    color = _colour(places, data, "circle")
    across = _position("x", data, x)
    up = _position("y", data, y)
    layers = [_layer({"type": "point", "filled": True, "size": 70}, color=color, x=across, y=up)]
    if "low" in data:
        low = _position("y", data, y, field="low")
        error_bar = {"type": "rule", "strokeWidth": 1.5}
        layers.insert(0, _layer(error_bar, color=color, x=across, y=low, y2={"field": "high"}))

    if name and len(data) <= FEW and data["name"].str.len().max() <= LONG:
        # Names stand above and below the points by turns, because those of neighbors would touch.
        data = data.assign(below=data["x"].rank(method="first") % 2 == 0)
        text: Spec = {"type": "text"}
        if "low" in data:
            # Beside the error bar.
            text |= {"align": "left", "dx": 6}
        text |= {"dy": {"expr": "datum.below ? 13 : -11"}, "fontSize": 11}
        names = {"field": "name", "type": "nominal"}
        layers.append(_layer(text, color={"value": "theme:ink"}, text=names, x=across, y=up))
    return _chart(title or y.heading, data, layers, places, name_axis | {"x": x, "y": y})


def spread(table: pd.DataFrame, x: Axis, y: Axis, places: Places, *, title: str = "") -> Chart:
    """Return a chart of the distribution of x in each group of y.

    It draws the members of a group, and a box from quartile to quartile. Of more than `MOST_SHOWN`
    members, those with evenly spaced ranks in their group are drawn.

    Args:
        table: A row for each member.
        x: The horizontal axis.
        y: The axis of groups.
        places: The places of the series.
        title: The title; by default the heading of the horizontal axis.
    """
    data = _by_role(table, x=x, y=y, series=SERIES)
    groups = _position("y", data, y)
    data = _thinned(data.sort_values("x", kind="stable"), "y", MOST_SHOWN)

    # Steps of the golden ratio spread neighbors without random numbers.
    data = data.assign(offset=(np.arange(len(data)) * 0.618034 % 1).round(2))
    places = _drawn(places, data)

    encoding = {"color": _colour(places, data, "circle"), "x": _position("x", data, x), "y": groups}
    box = {
        "type": "boxplot",
        "median": {"color": "theme:ink"},
        "opacity": 0.4,
        "outliers": False,
        "rule": {"color": "theme:muted"},
        "size": 26,
    }
    dot = {
        "type": "point",
        "filled": True,
        "size": 14,
        "yOffset": {"expr": "(datum.offset - 0.5) * 22"},
    }
    layers = [_layer(box, **encoding), _layer(dot, **encoding)]
    height = max(60, 20 + 2 * ROW * data["y"].nunique())
    return _chart(title or x.heading, data, layers, places, {"y": y, "x": x}, height)


def heat(
    values: pd.DataFrame, across: str, value: Axis, *, title: str = "", most: int = MOST_CELLS
) -> Chart:
    """Return a chart with a cell for each value of a table.

    Args:
        values: The table; its index has a name.
        across: The name of its columns.
        value: How a value is shown.
        title: The title; by default the heading of the values.
        most: Of more rows or columns, evenly spaced ones are drawn.
    """
    rows = evenly_spaced(values.shape[0], most=most)
    columns = evenly_spaced(values.shape[1], most=most)
    values = values.iloc[rows, columns].rename(str).rename(str, axis=1)
    x = Axis(across)
    y = Axis(str(values.index.name))
    table = values.reset_index().melt(y.column, var_name=across, value_name=value.column)
    data = _by_role(table, x=x, y=y, value=value)

    scale: Spec = {"interpolate": "rgb", "range": "ramp"}
    if value.ends:
        scale = {"domain": _domain(value.ends), **scale}

    legend: Spec = {"gradientLength": 180, "title": value.heading}
    if value.format:
        legend = {"format": value.format, **legend}

    axis = {
        "domain": False,
        "grid": False,
        "labelAngle": 0,
        "labelOverlap": "parity",
        "labelSeparation": 4,
        "ticks": False,
    }
    color = {"field": "value", "legend": legend, "scale": scale, "type": "quantitative"}
    cells = _layer(
        {"type": "rect"},
        color=color,
        x=_cells("x", x, list(map(str, values)), axis),
        y=_cells("y", y, list(map(str, values.index)), axis),
    )
    height = min(max(60, 20 + ROW * len(values)), 420)
    axes = {"x": x, "y": y, "value": value}
    return _chart(title or value.heading, data, [cells], {}, axes, height)


def metric_axis(column: str, metric: str, values: pd.Series[float], title: str = "") -> Axis:
    """Return an axis of a metric.

    Shares are shown in per cent. The axis of a loss or perplexity is logarithmic if its values span
    decades.

    Args:
        column: The column with the values.
        metric: The metric that they are of.
        values: The values.
        title: The title; by default the metric in words.
    """
    finite = values[np.isfinite(values)]
    spans_decades = len(finite) > 0 and 0 < finite.min() < finite.max() / DECADES
    is_loss = "perplexity" in metric or "loss" in metric
    return Axis(
        column,
        title or readable(metric),
        format=SHARE if is_share(metric) else "",
        log=is_loss and spans_decades,
    )


def common_axis(metric: str, tables: Iterable[pd.DataFrame], column: str, title: str) -> Axis:
    """Return one axis of a metric for several charts.

    Args:
        metric: The metric.
        tables: The tables of the charts.
        column: The column with the values; `low` and `high` count, too.
        title: The title.
    """
    values = pd.concat(tables).reindex(columns=[column, "low", "high"])
    low = values.min().min()
    high = values.max().max()
    axis = metric_axis(column, metric, values[column], title)
    if not high > low:
        return axis

    # On a logarithmic axis, a margin could reach below 0.
    margin = 0 if axis.log else MARGIN * (high - low)
    return replace(axis, ends=(low - margin, high + margin))


def course_table(
    group: Group, column: str, series: str, along: Along | None = None
) -> pd.DataFrame:
    """Return the course of a metric as a table for charts; see `Group.course`.

    Args:
        group: The runs.
        column: The column of metrics.csv.
        series: The name of the series.
        along: What to draw it over; by default the round.

    Returns:
        The course with columns `series`, `round`, and `at` for the means of `along` over the runs.
    """
    course = group.course(column)
    at = course.index.to_series()
    if along is not None:
        at = pd.concat([along(run) for run in group.runs], axis=1).loc[course.index].mean(axis=1)
    return course.assign(at=at, series=series).reset_index(names="round")


def stacked(parts: Sequence[pd.DataFrame], metric: str) -> pd.DataFrame:
    """Return tables as one, below each other.

    The intervals of a share end at 0 and 1, because it has no values beyond.
    """
    table = pd.concat(parts, ignore_index=True)
    if is_share(metric):
        table[["low", "high"]] = table[["low", "high"]].clip(0.0, 1.0)
    return table


def file_name(kind: str, name: str) -> str:
    """Return the name of a figure's files, such as `rounds-digits-diversity-3`."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{kind}-{words}"


def evenly_spaced(count: int, *, most: int) -> np.ndarray:
    """Return at most `most` of the positions 0..count - 1, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def colour_of(place: int) -> str:
    """Return the name of the color of a series."""
    return f"theme:c{place % len(THEME['light']['series'])}"


def dash_of(place: int) -> list[int]:
    """Return the lengths of a series' strokes and gaps, in pixels."""
    lengths: list[int] = THEME["dashes"][place % len(THEME["dashes"])]
    return lengths


def coloured(spec: dict[str, Any], scheme: str) -> dict[str, Any]:
    """Return a specification with colors in place of their names.

    Args:
        spec: The specification.
        scheme: `light` or `dark`.
    """
    color_of_name = dict(THEME[scheme])
    for place, color in enumerate(THEME[scheme]["series"]):
        color_of_name[f"c{place}"] = color

    text = re.sub(
        r'"theme:(\w+)"', lambda match: json.dumps(color_of_name[match[1]]), json.dumps(spec)
    )
    with_colors: dict[str, Any] = json.loads(text)
    return with_colors


def _thinned(data: pd.DataFrame, by: str, most: int) -> pd.DataFrame:
    """Return at most `most` rows for each value of a column, evenly spaced."""
    if data.empty:
        return data
    parts = []
    for _, part in data.groupby(by, sort=False):
        parts.append(part.iloc[evenly_spaced(len(part), most=most)])
    return pd.concat(parts)


def _by_role(table: pd.DataFrame, **columns: Axis) -> pd.DataFrame:
    """Return columns of a table by their roles, without rows that cannot be drawn.

    `low` and `high` stay if the table has them.

    Args:
        table: The table.
        columns: The axis of each role.
    """
    values = {role: table[axis.column] for role, axis in columns.items()}
    for end in ("low", "high"):
        if end in table and table[end].notna().any():
            values[end] = table[end]

    data = pd.DataFrame(values).replace([np.inf, -np.inf], np.nan)
    return data.dropna(subset=list(columns), ignore_index=True)


def _drawn(places: Places, data: pd.DataFrame) -> Places:
    """Return the places of the series that are in the data."""
    names = set(data["series"])
    return {name: place for name, place in places.items() if name in names}


def _layer(mark: Spec, **encoding: Spec) -> Spec:
    """Return a layer of a chart: how a row is drawn, and the channels that its columns go to."""
    return {"mark": mark, "encoding": encoding}


def _scale(places: Places, look: Callable[[int], Any]) -> Spec:
    """Return the scale of colors or dashes, which `look` gives for a place."""
    return {"domain": list(places), "range": [look(place) for place in places.values()]}


def _domain(ends: tuple[float, float]) -> list[float]:
    """Return the ends of a scale. JSON cannot write the numbers of a table's columns."""
    return [end.item() if isinstance(end, np.generic) else end for end in ends]


def _colour(places: Places, data: pd.DataFrame, symbol: str) -> Spec:
    """Return the channel of colors; its legend is for files, because a page has its own."""
    explains_itself = len(places) < 2 or bool((data["y"] == data["series"]).all())
    return {
        "field": "series",
        "legend": None if explains_itself else {"symbolType": symbol},
        "scale": _scale(places, colour_of),
        "title": None,
        "type": "nominal",
    }


def _cells(role: str, axis: Axis, names: Sequence[str], look: Spec) -> Spec:
    """Return the channel of the rows or of the columns of a heat map, in the order of `names`."""
    return {
        "axis": look,
        "field": role,
        "sort": names,
        "title": axis.heading,
        "type": "ordinal",
    }


def _position(role: str, data: pd.DataFrame, axis: Axis, *, field: str = "") -> Spec:
    """Return the channel of a position.

    Args:
        role: `x` or `y`.
        data: The data by role.
        axis: The axis.
        field: The column to draw instead of the one of the role.
    """
    # The title of a vertical axis is that of its chart.
    title = axis.heading if role == "x" else None

    is_number = data[role].dtype.kind in "iufb"
    if not is_number:
        # `FedBCD, gamma 1.0, wait 5` has a line for each part, the middle one beside its row.
        parts = "split(datum.label, ', ')"
        name_axis = {
            "domain": False,
            "labelExpr": parts,
            "labelOffset": {"expr": f"7 - 7 * length({parts})"},
            "ticks": False,
        }
        # In the order of the table. Vega would take that of the first layer, which can lack rows.
        names = data[role].drop_duplicates().tolist()
        return {
            "axis": name_axis,
            "field": role,
            "sort": names,
            "title": title,
            "type": "nominal",
        }

    scale: Spec = {"zero": axis.zero}
    if axis.log:
        scale = {"type": "log", "nice": False}
    if axis.ends:
        scale["domain"] = _domain(axis.ends)
        scale["padding"] = 0

    look: Spec = {"grid": role == "y"}
    if axis.format:
        look["format"] = axis.format
    if role == "x" and (data["x"] % 1 == 0).all():
        # Rounds and clients are whole numbers: there is nothing between them.
        scale["nice"] = False
        look["format"] = axis.format or ",d"
        look["labelExpr"] = "datum.value % 1 ? '' : datum.label"
        look["tickOpacity"] = {"expr": "datum.value % 1 ? 0 : 1"}

    return {
        "axis": dict(sorted(look.items())),
        "field": field or role,
        "scale": dict(sorted(scale.items())),
        "title": title,
        "type": "quantitative",
    }


def _chart(
    title: str,
    data: pd.DataFrame,
    layers: Sequence[Spec],
    places: Places,
    columns: Mapping[str, Axis],
    height: int = HEIGHT,
) -> Chart:
    """Return layers as one chart.

    Args:
        title: The title.
        data: The data by role.
        layers: The layers, the lowest first.
        places: The places of the series.
        columns: The axes by role.
        height: The height in pixels.
    """
    shown_columns: dict[str, Axis] = {}
    if places:
        # A column that repeats another one would tell readers nothing.
        is_repetition = any((data["series"] == data[role]).all() for role in columns)
        if not is_repetition:
            shown_columns["series"] = SERIES
    shown_columns |= columns
    for end in ("low", "high"):
        if end in data:
            shown_columns[end] = Axis(end)

    # The page adds its own configuration and data.
    spec = {"layer": list(layers), "height": height, "$schema": SCHEMA}
    return Chart(title, spec, data, shown_columns, places)
