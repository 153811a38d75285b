"""Charts of Altair from tidy tables: lines with bands, points with error bars, spreads, heat maps.

A table has a row for each mark; `low` and `high`, where it has them, are the ends of an interval.
The page adds what answers to a pointer.

A chart names its colours (`theme:ink`, `theme:c0`), and `coloured` puts in those of a scheme of
templates/theme.json, light or dark. Series colours have a contrast of at least 3:1 with the
background, texts one of at least 4.5:1 (WCAG 2.2 AA). They were chosen for the largest distance in
OKLab under normal vision and the three colour vision deficiencies of Machado et al., "A
Physiologically-based Model for Simulation of Color Vision Deficiency", TVCG 2009; dashes tell
series apart where colours repeat or are printed in grey.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from lightfed.lab.results.groups import Group
from lightfed.lab.results.run import Run
from lightfed.lab.results.text import is_share, readable

THEME = json.loads((files("lightfed.lab.drawing") / "templates" / "theme.json").read_text("utf-8"))
DECADES = 50  # ratio of largest to smallest value from which a loss has a log axis
SHARE = ".4~%"  # on axes, and precise enough for the numbers at a mark
MARGIN = 0.04  # of an axis, beside its values
MOST_ROUNDS = 150  # points of a line; of more, evenly spaced ones are drawn
MOST_SHOWN = 300  # members of a group that are drawn as points
MOST_CELLS = 40  # rows and columns of a heat map
FEW = 15  # points of a line that are marked, or that have names
LONG = 22  # characters of a name that has no room beside a point
HEIGHT, ROW = 250, 24  # pixels of a chart, and of a row of cells
BOXES = (
    "Points: clients, of many those with evenly spaced ranks. Boxes: quartiles and median; lines: "
    "as far as 1.5 times the box."
)
Along = Callable[[Run], "pd.Series[float]"]
Places = Mapping[str, int]  # of series: which colour and dash they have wherever they are drawn
UNSET: Any = alt.Undefined


@dataclass(frozen=True)
class Axis:
    """How a column of a table is shown.

    Attributes:
        column: its name.
        title: beside the axis and in tables; the readable name of the column by default.
        format: of numbers, in d3's language.
        log: whether the axis is logarithmic.
        zero: whether it begins at zero.
        ends: of the axis; chosen from the values by default.
    """

    column: str
    title: str = ""
    format: str = ""
    log: bool = False
    zero: bool = False
    ends: tuple[float, float] | None = None

    @property
    def heading(self) -> str:
        return self.title or readable(self.column)


SERIES = Axis("series")


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: above it.
        spec: in Vega-Lite, without data, width and configuration; colours by name.
        data: what it shows, with the columns that the specification names.
        columns: of the data those that readers see, in their order, with heading and format.
        places: of the series that it draws, by name; they can be switched off.
    """

    title: str
    spec: dict[str, Any]
    data: pd.DataFrame
    columns: Mapping[str, Axis]
    places: Places

    @property
    def values(self) -> dict[str, Any]:
        """The data as `columns` and rows of `data`, numbers with five digits."""
        short = self.data.map(lambda x: float(f"{x:.5g}") if isinstance(x, float) else x)
        text = short.to_json(orient="split", index=False, double_precision=15)
        values: dict[str, Any] = json.loads(text)
        return values

    @property
    def table(self) -> pd.DataFrame:
        """What a reader may want as numbers."""
        said = [axis.heading for axis in self.columns.values()]
        pairs = zip(self.columns, said, strict=True)
        names = [h if said.count(h) == 1 else f"{h} {column}" for column, h in pairs]
        return self.data[list(self.columns)].set_axis(names, axis=1)


@dataclass(frozen=True)
class Figure:
    """Charts that belong together, the name of their files, and a caption: how to read them."""

    name: str
    title: str
    charts: tuple[Chart, ...]
    caption: str = ""

    @property
    def series(self) -> dict[str, int]:
        """Names drawn in any of its charts and their places, for one legend."""
        return {name: place for one in self.charts for name, place in one.places.items()}

    @property
    def table(self) -> pd.DataFrame:
        """The numbers of all its charts."""
        tables = {chart.title: chart.table for chart in self.charts}
        return pd.concat(tables, names=["chart"]).reset_index("chart")


def lines(table: pd.DataFrame, x: Axis, y: Axis, places: Places, *, title: str = "") -> Chart:
    """A line for each series through its measured points, with a band from `low` to `high`."""
    data = _thinned(_by_role(table, x=x, y=y, series=SERIES), "series", MOST_ROUNDS)
    few = len(data) == 0 or data["series"].value_counts().max() <= FEW
    places = _drawn(places, data)
    drawn = alt.Chart().encode(_position("x", data, x), _colour(places, data, "stroke"))
    line = drawn.mark_line(point=alt.OverlayMarkDef(size=40, opacity=int(few)))
    dashes = _scale(places, dash_of)
    dash = alt.StrokeDash("series:N", scale=dashes, title=None)  # in the legend of the colours
    layers = [line.encode(_position("y", data, y), dash)]
    if "low" in data:
        ends = {"y": _position("y", data, y, field="low"), "y2": "high"}
        layers.insert(0, drawn.mark_area(opacity=0.16).encode(**ends))
    return _chart(title or y.heading, data, layers, places, {"x": x, "y": y})


def points(
    table: pd.DataFrame, x: Axis, y: Axis, places: Places, *, name: str = "", title: str = ""
) -> Chart:
    """A point for each row with an error bar from `low` to `high`.

    `name` is a column with the name of each point, which stands beside it if they are few and
    short.
    """
    named = {"name": Axis(name)} if name else {}
    data = _by_role(table, x=x, y=y, series=SERIES, **named)
    places = _drawn(places, data)
    drawn = alt.Chart().encode(_position("x", data, x), _colour(places, data, "circle"))
    layers = [drawn.mark_point(filled=True, size=70).encode(_position("y", data, y))]
    if "low" in data:
        ends = {"y": _position("y", data, y, field="low"), "y2": "high"}
        layers.insert(0, drawn.mark_rule(strokeWidth=1.5).encode(**ends))
    if name and len(data) <= FEW and data["name"].str.len().max() <= LONG:
        # by turns above and below the points, as neighbours would touch; beside error bars
        data = data.assign(below=data["x"].rank(method="first") % 2 == 0)
        beside: Any = {"align": "left", "dx": 6} if "low" in data else {}
        text = drawn.mark_text(fontSize=11, dy=alt.expr("datum.below ? 13 : -11"), **beside)
        ink, place = alt.value("theme:ink"), _position("y", data, y)
        layers.append(text.encode(place, text="name:N", color=ink))
    return _chart(title or y.heading, data, layers, places, named | {"x": x, "y": y})


def spread(table: pd.DataFrame, x: Axis, y: Axis, places: Places, *, title: str = "") -> Chart:
    """The distribution of x in each group of y: its members, and a box from quartile to quartile.

    Of more than MOST_SHOWN members those with evenly spaced ranks in their group are drawn.
    """
    data = _by_role(table, x=x, y=y, series=SERIES)
    groups = _position("y", data, y)
    data = _thinned(data.sort_values("x", kind="stable"), "y", MOST_SHOWN)
    # golden-ratio steps spread neighbours without random numbers
    data = data.assign(offset=(np.arange(len(data)) * 0.618034 % 1).round(2))
    places = _drawn(places, data)
    drawn = alt.Chart().encode(_position("x", data, x), groups, _colour(places, data, "circle"))
    dot = drawn.mark_point(filled=True, size=14, yOffset=alt.expr("(datum.offset - 0.5) * 22"))
    muted, ink = (alt.MarkConfig(color=f"theme:{name}") for name in ("muted", "ink"))
    box = drawn.mark_boxplot(size=26, opacity=0.4, outliers=False, rule=muted, median=ink)
    height = max(60, 20 + 2 * ROW * data["y"].nunique())
    return _chart(title or x.heading, data, [box, dot], places, {"y": y, "x": x}, height)


def heat(
    values: pd.DataFrame, across: str, value: Axis, *, title: str = "", most: int = MOST_CELLS
) -> Chart:
    """A cell for each value of a table; its index has a name, and `across` is that of its columns.

    Of more than `most` rows or columns evenly spaced ones are drawn.
    """
    rows, columns = (evenly_spaced(count, most=most) for count in values.shape)
    values = values.iloc[rows, columns].rename(str).rename(str, axis=1)
    x, y = Axis(across), Axis(str(values.index.name))
    table = values.reset_index().melt(y.column, var_name=across, value_name=value.column)
    data = _by_role(table, x=x, y=y, value=value)
    scale = alt.Scale(range="ramp", interpolate="rgb", domain=value.ends or UNSET)
    legend = alt.Legend(title=value.heading, gradientLength=180, format=value.format or UNSET)
    look: Any = {"labelAngle": 0, "ticks": False, "domain": False, "grid": False}
    cells = alt.Axis(labelOverlap="parity", labelSeparation=4, **look)
    cell = alt.Chart().encode(
        alt.X("x:O", title=x.heading, sort=[*values], axis=cells),
        alt.Y("y:O", title=y.heading, sort=[*values.index], axis=cells),
        alt.Color("value:Q", scale=scale, legend=legend),
    )
    height = min(max(60, 20 + ROW * len(values)), 420)
    named = {"x": x, "y": y, "value": value}
    return _chart(title or value.heading, data, [cell.mark_rect()], {}, named, height)


def metric_axis(column: str, metric: str, values: pd.Series[float], title: str = "") -> Axis:
    """An axis of a metric: shares in per cent, losses and perplexities over decades in log."""
    known = values[np.isfinite(values)]
    wide = len(known) > 0 and 0 < known.min() < known.max() / DECADES
    log = ("perplexity" in metric or "loss" in metric) and wide
    return Axis(column, title or readable(metric), SHARE if is_share(metric) else "", log=log)


def common_axis(metric: str, tables: Iterable[pd.DataFrame], column: str, title: str) -> Axis:
    """One axis of a metric for several charts."""
    every = pd.concat(tables).reindex(columns=[column, "low", "high"])
    low, high = every.min().min(), every.max().max()
    axis = metric_axis(column, metric, every[column], title)
    margin = 0 if axis.log else MARGIN * (high - low)
    return replace(axis, ends=(low - margin, high + margin)) if high > low else axis


def course_table(
    group: Group, column: str, series: str, along: Along | None = None
) -> pd.DataFrame:
    """`Group.course` with `series`, and `at`: what `along` gives by round, mean over the runs."""
    course = group.course(column)
    at = course.index.to_series()
    if along is not None:
        at = pd.concat([along(run) for run in group.runs], axis=1).loc[course.index].mean(axis=1)
    return course.assign(at=at, series=series).reset_index(names="round")


def stacked(parts: Sequence[pd.DataFrame], metric: str) -> pd.DataFrame:
    """One below the other; intervals of a share end at 0 and 1, beyond which it has no values."""
    table = pd.concat(parts, ignore_index=True)
    if is_share(metric):
        table[["low", "high"]] = table[["low", "high"]].clip(0.0, 1.0)
    return table


def file_name(kind: str, name: str) -> str:
    """Of a figure's files: `rounds-digits-diversity-3`."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"


def evenly_spaced(count: int, *, most: int) -> np.ndarray:
    """At most `most` of the places 0..count - 1, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def colour_of(place: int) -> str:
    """The colour of a series, by name."""
    return f"theme:c{place % len(THEME['light']['series'])}"


def dash_of(place: int) -> list[int]:
    """Lengths of strokes and gaps in pixels."""
    lengths: list[int] = THEME["dashes"][place % len(THEME["dashes"])]
    return lengths


def coloured(spec: dict[str, Any], scheme: str) -> dict[str, Any]:
    """A specification with the colours of a scheme, `light` or `dark`, in place of their names."""
    colours = THEME[scheme] | {f"c{i}": name for i, name in enumerate(THEME[scheme]["series"])}
    text = re.sub(r'"theme:(\w+)"', lambda name: json.dumps(colours[name[1]]), json.dumps(spec))
    named: dict[str, Any] = json.loads(text)
    return named


def _thinned(data: pd.DataFrame, by: str, most: int) -> pd.DataFrame:
    """At most so many rows of each value of a column, evenly spaced."""
    parts = [part for _, part in data.groupby(by, sort=False)]
    return pd.concat([part.iloc[evenly_spaced(len(part), most=most)] for part in parts] or [data])


def _by_role(table: pd.DataFrame, **columns: Axis) -> pd.DataFrame:
    """The columns by their role, with `low` and `high`, without rows that have no place."""
    taken = {role: table[axis.column] for role, axis in columns.items()}
    ends = {end: table[end] for end in ("low", "high") if end in table and table[end].notna().any()}
    data = pd.DataFrame(taken | ends).replace([np.inf, -np.inf], np.nan)
    return data.dropna(subset=list(columns), ignore_index=True)


def _drawn(places: Places, data: pd.DataFrame) -> Places:
    """The places of the series in `data`."""
    names = {*data["series"]}
    return {name: place for name, place in places.items() if name in names}


def _scale(places: Places, look: Callable[[int], Any]) -> alt.Scale:
    """The colours or dashes of the series."""
    return alt.Scale(domain=[*places], range=[*map(look, places.values())])


def _colour(places: Places, data: pd.DataFrame, symbol: str) -> alt.Color:
    """The channel of colours; its legend is for files, as a page has its own."""
    alone = len(places) < 2 or bool((data["y"] == data["series"]).all())
    legend = None if alone else alt.Legend(symbolType=symbol)
    return alt.Color("series:N", scale=_scale(places, colour_of), title=None, legend=legend)


def _position(role: str, data: pd.DataFrame, axis: Axis, *, field: str = "") -> Any:
    """The channel of a position: of names or of numbers."""
    channel: Any = alt.X if role == "x" else alt.Y
    title = axis.heading if role == "x" else None
    if data[role].dtype.kind not in "iufb":
        # in the order of the table: Vega would take that of the first layer, which may lack rows
        names = data[role].drop_duplicates().tolist()
        # a line for each part of `FedBCD, gamma 1.0, wait 5`, the middle one beside its row
        parts = "split(datum.label, ', ')"
        look: Any = {"labelExpr": parts, "labelOffset": alt.expr(f"7 - 7 * length({parts})")}
        look |= {"domain": False, "ticks": False}
        return channel(f"{role}:N", title=title, sort=names, axis=alt.Axis(**look))
    scale: Any = {"type": "log", "nice": False} if axis.log else {"zero": axis.zero}
    scale |= {"domain": axis.ends, "padding": 0} if axis.ends else {}
    look = {"format": axis.format or UNSET, "grid": role == "y"}
    if role == "x" and (data["x"] % 1 == 0).all():  # such as rounds and clients
        scale |= {"nice": False}
        look |= {"format": axis.format or ",d"}
        look |= {"labelExpr": "datum.value % 1 ? '' : datum.label"}
        look |= {"tickOpacity": alt.expr("datum.value % 1 ? 0 : 1")}
    shown = {"title": title, "scale": alt.Scale(**scale), "axis": alt.Axis(**look)}
    return channel(f"{field or role}:Q", **shown)


def _chart(
    title: str,
    data: pd.DataFrame,
    layers: Sequence[alt.Chart],
    places: Places,
    columns: Mapping[str, Axis],
    height: int = HEIGHT,
) -> Chart:
    """The layers as one chart."""
    if places and not any((data["series"] == data[role]).all() for role in columns):
        columns = {"series": SERIES, **columns}
    columns = {**columns, **{end: Axis(end) for end in ("low", "high") if end in data}}
    drawing: Any = alt.layer(*layers, data=alt.NamedData("rows")).properties(height=height)
    spec = drawing.to_dict(validate=False)
    shown = {key: value for key, value in spec.items() if key not in ("config", "data")}
    return Chart(title, shown, data, columns, places)
