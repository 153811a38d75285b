"""Charts from tidy tables: lines with bands, points with error bars, spreads, heat maps.

A table has a row for each mark; `low` and `high`, where it has them, are the ends of an interval.
The page adds what answers to a pointer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from lightfed.drawing.charts import Axis, Chart, Series
from lightfed.drawing.theme import colour_of, dash_of

MOST_ROUNDS = 150  # points of a line; of more, evenly spaced ones are drawn
MOST_POINTS = 3000  # of all lines of a chart
MOST_SHOWN = 1200  # members of all groups that are drawn as points
FEW = 15  # points of a line that are marked, or that have names
LONG = 22  # characters of a name that has no room beside a point
HEIGHT = 250
STEP = 24  # pixels of a row of points
BOXES = (
    "Points: clients, of many those with evenly spaced ranks. Boxes: quartiles and median; lines: "
    "as far as 1.5 times the box."
)


def lines(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """A line for each series through its measured points, with a band from `low` to `high`."""
    data = _by_role(table, x=x, y=y, series=by)
    data = _thinned(data, "series", MOST_POINTS, most=MOST_ROUNDS)
    few = len(data) == 0 or data["series"].value_counts().max() <= FEW
    drawn = alt.Chart().encode(_position("x", data, x), _colour(by, data, line=True))
    line = drawn.mark_line(point=alt.OverlayMarkDef(size=40, opacity=int(few)))
    layers = [line.encode(_position("y", data, y), _dash(by, data))]
    if "low" in data:
        band = drawn.mark_area(opacity=0.16)
        layers.insert(0, band.encode(_position("y", data, y, field="low"), y2="high"))
    return _chart(title or y.heading, data, layers, by, {"x": x, "y": y})


def points(
    table: pd.DataFrame,
    x: Axis,
    y: Axis,
    by: Series,
    *,
    across: bool = False,
    name: str = "",
    title: str = "",
) -> Chart:
    """A point for each row with an error bar from `low` to `high`.

    `x` and `y` are quantities, or names. With `across`, `low` and `high` are of x. `name` is a
    column with the name of each point, which stands beside it if they are few and short.
    """
    named = {"name": Axis(name)} if name else {}
    data = _by_role(table, x=x, y=y, series=by, **named)
    drawn = alt.Chart().encode(_position("x", data, x), _position("y", data, y), _colour(by, data))
    layers = [drawn.mark_point(filled=True, size=70)]
    if "low" in data:
        role, axis = ("x", x) if across else ("y", y)
        ends = {role: _position(role, data, axis, field="low"), f"{role}2": "high"}
        layers.insert(0, drawn.mark_rule(strokeWidth=1.5).encode(**ends))
    if name and len(data) <= FEW and data["name"].str.len().max() <= LONG:
        # by turns above and below the points, as neighbours would touch; beside error bars
        data = data.assign(below=data["x"].rank(method="first") % 2 == 0)
        beside: Any = {"align": "left", "dx": 6} if "low" in data and not across else {}
        text = drawn.mark_text(fontSize=11, dy=alt.expr("datum.below ? 13 : -11"), **beside)
        layers.append(text.encode(text="name:N", color=alt.value("theme:ink")))
    heading = title or (x if _of_names(data, "y") else y).heading
    return _chart(heading, data, layers, by, named | {"x": x, "y": y})


def spread(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """The distribution of x in each group of y: its members, and a box from quartile to quartile.

    Of more than MOST_SHOWN members those with evenly spaced ranks in their group are drawn.
    """
    data = _by_role(table, x=x, y=y, series=by)
    y = replace(y, names=y.names or tuple(data["y"].drop_duplicates()))
    data = _thinned(data.sort_values("x", kind="stable"), "y", MOST_SHOWN)
    # golden-ratio steps spread neighbours without random numbers
    data = data.assign(offset=(np.arange(len(data)) * 0.618034 % 1).round(2))
    place = _position("x", data, x), _position("y", data, y)
    drawn = alt.Chart().encode(*place, _colour(by, data))
    dot = drawn.mark_point(filled=True, size=14, yOffset=alt.expr("(datum.offset - 0.5) * 22"))
    muted, ink = (alt.MarkConfig(color=f"theme:{name}") for name in ("muted", "ink"))
    box = drawn.mark_boxplot(size=26, opacity=0.4, outliers=False, rule=muted, median=ink)
    return _chart(title or x.heading, data, [box, dot], by, {"y": y, "x": x}, step=2 * STEP)


def heat(
    table: pd.DataFrame,
    x: Axis,
    y: Axis,
    value: Axis,
    *,
    colours: str = "ramp",
    middle: float | None = None,
    title: str = "",
) -> Chart:
    """A cell for each row; x and y are names or numbers of cells.

    `value` is the shade; `colours` are `ramp` or `diverging`, and `middle` is the value in the
    middle of the latter.
    """
    data = _by_role(table, x=x, y=y, value=value)
    scale = _known(range=colours, interpolate="rgb", domainMid=middle, domain=value.ends)
    legend = _known(title=value.heading, gradientLength=180, format=value.format)
    shade = alt.Color("value:Q", scale=alt.Scale(**scale), legend=alt.Legend(**legend))
    look: Any = {"labelAngle": 0, "ticks": False, "domain": False, "grid": False}
    cells = alt.Axis(labelOverlap="parity", labelSeparation=4, **look)
    cell = (
        alt.Chart()
        .mark_rect()
        .encode(
            alt.X("x:O", title=x.heading, sort=list(x.names) or None, axis=cells),
            alt.Y("y:O", title=y.heading, sort=list(y.names) or None, axis=cells),
            shade,
        )
    )
    return _chart(title or value.heading, data, [cell], None, {"x": x, "y": y, "value": value})


def evenly_spaced(count: int, *, most: int) -> np.ndarray:
    """At most `most` of the places 0..count - 1, with the first and the last."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _thinned(data: pd.DataFrame, by: str, total: int, *, most: int = MOST_SHOWN) -> pd.DataFrame:
    """At most so many rows of each value of a column and in all, evenly spaced."""
    parts = [part for _, part in data.groupby(by, sort=False)]
    most = min(most, max(30, total // max(1, len(parts))))
    return pd.concat([part.iloc[evenly_spaced(len(part), most=most)] for part in parts] or [data])


def _by_role(table: pd.DataFrame, **columns: Axis | Series) -> pd.DataFrame:
    """The columns by their role, with `low` and `high`, without rows that have no place."""
    taken = {role: table[axis.column] for role, axis in columns.items()}
    ends = {end: table[end] for end in ("low", "high") if end in table and table[end].notna().any()}
    data = pd.DataFrame(taken | ends).replace([np.inf, -np.inf], np.nan)
    return data.dropna(subset=list(columns), ignore_index=True)


def _of_names(data: pd.DataFrame, role: str) -> bool:
    return data[role].dtype.kind not in "iufb"


def _known(**options: Any) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value not in (None, "")}


def _colour(by: Series, data: pd.DataFrame, *, line: bool = False) -> alt.Color:
    """The channel of colours; its legend is for files, as a page has its own."""
    drawn = by.drawn(data)
    alone = len(drawn) < 2 or bool((data["y"] == data["series"]).all())
    legend = None if alone else alt.Legend(symbolType="stroke" if line else "circle")
    colours = alt.Scale(domain=[*drawn], range=[colour_of(place) for place in drawn.values()])
    return alt.Color("series:N", scale=colours, title=None, legend=legend)


def _dash(by: Series, data: pd.DataFrame) -> alt.StrokeDash:
    """The channel of dashes, in the legend of the colours."""
    drawn = by.drawn(data)
    dashes = alt.Scale(domain=[*drawn], range=[dash_of(place) for place in drawn.values()])
    return alt.StrokeDash("series:N", scale=dashes, title=None)


def _position(role: str, data: pd.DataFrame, axis: Axis, *, field: str = "") -> Any:
    """The channel of a position: of names or of numbers."""
    channel = alt.X if role == "x" else alt.Y
    title = axis.heading if role == "x" else None
    if _of_names(data, role):
        # in the order of the table: Vega would take that of the first layer, which may lack rows
        names = list(axis.names or data[role].drop_duplicates())
        look: Any = {"labelAngle": 0} if role == "x" else {"domain": False, "ticks": False}
        return channel(f"{role}:N", title=title, sort=names, axis=alt.Axis(**look))
    scale: Any = {"type": "log", "nice": False} if axis.log else {"zero": axis.zero}
    scale |= _known(domain=axis.ends, padding=0 if axis.ends else None)
    step = 1 if axis.column in ("round", "rank") else None
    look = _known(format=axis.format, grid=False if role == "x" else None, tickMinStep=step)
    options: Any = {"title": title, "scale": alt.Scale(**scale), "axis": alt.Axis(**look)}
    return channel(f"{field or role}:Q", **options)


def _chart(
    title: str,
    data: pd.DataFrame,
    layers: Sequence[alt.Chart],
    by: Series | None,
    columns: Mapping[str, Axis],
    *,
    step: int = STEP,
) -> Chart:
    """The layers as one chart, with a row for each name."""
    height = HEIGHT
    if by is None or _of_names(data, "y"):
        height = min(max(60, 20 + step * data["y"].nunique()), 420 if by is None else 4000)
    if by is not None and not any((data["series"] == data[role]).all() for role in columns):
        columns = {"series": Axis("series", by.title or by.column), **columns}
    columns = {**columns, **{end: Axis(end) for end in ("low", "high") if end in data}}
    drawing: Any = alt.layer(*layers, data=alt.NamedData("rows")).properties(height=height)
    return Chart(title, drawing, data, columns, by)
