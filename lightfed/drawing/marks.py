"""Charts from tidy tables: lines with bands, points with error bars, spreads, bars, heat maps.

A table has a row for each mark; `low` and `high`, where it has them, are the ends of an interval.
The page adds what answers to a pointer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from lightfed.drawing.charts import Axis, Chart, Series
from lightfed.drawing.theme import colour_of, dash_of

MOST_ROUNDS = 150  # points of a line; of more, evenly spaced ones are drawn
MOST_POINTS = 3000  # of all lines of a chart
FEW = 15  # points of a line that are marked
MOST_SHOWN = 1200  # members of all groups that are drawn as points
HEIGHT = 250
STEP = 24  # pixels of a row of bars or points
LINE = 15  # pixels of a line of such a row's name
LONG = 22  # characters of a name that is cut at its commas, or has no room beside a point
BOX = {"p5": "5 %", "p25": "25 %", "p50": "median", "p75": "75 %", "p95": "95 %", "mean": "mean"}


def lines(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """A line for each series through its measured points, with a band from `low` to `high`."""
    data = _by_role(table, x=x, y=y, series=by)
    most = min(MOST_ROUNDS, max(30, MOST_POINTS // max(1, data["series"].nunique())))
    data = _thinned(data, "series", most)
    few = data["series"].value_counts().max() <= FEW
    drawn = alt.Chart().encode(
        x=_position("x", data, x, padding=8), color=_colour(by, data, line=True)
    )
    marked = alt.OverlayMarkDef(size=40, opacity=int(few))
    line = drawn.mark_line(strokeWidth=2, point=marked)
    layers = [line.encode(y=_position("y", data, y, padding=6), strokeDash=_dash(by, data))]
    if "low" in data:
        ends = {"y": _position("y", data, y, field="low"), "y2": "high"}
        layers.insert(0, drawn.mark_area(opacity=0.16).encode(**ends))
    return _chart(title or y.heading, data, layers, _shown(data, x, y, by), by)


def points(
    table: pd.DataFrame,
    x: Axis,
    y: Axis,
    by: Series,
    *,
    connected: bool = False,
    across: bool = False,
    name: str = "",
    title: str = "",
) -> Chart:
    """A point for each row with an error bar from `low` to `high`.

    `x` and `y` are quantities, or names. With `across`, `low` and `high` are of x. `connected`
    draws a line through the points of a series. `name` is a column with the name of each point,
    which stands beside it if they are few and short.
    """
    named = {"name": Axis(name)} if name else {}
    data = _by_role(table, x=x, y=y, series=by, **named)
    place = {"x": _position("x", data, x, padding=14), "y": _position("y", data, y, padding=14)}
    drawn = alt.Chart().encode(**place, color=_colour(by, data, line=connected))
    layers = [drawn.mark_point(filled=True, size=70)]
    if connected:
        layers.insert(0, drawn.mark_line(strokeWidth=1.5).encode(strokeDash=_dash(by, data)))
    if "low" in data:
        role, axis = ("x", x) if across else ("y", y)
        ends = {role: _position(role, data, axis, field="low"), f"{role}2": "high"}
        layers.insert(0, drawn.mark_rule(strokeWidth=1.5).encode(**ends))
    if name and len(data) <= FEW and data["name"].str.len().max() <= LONG:
        # by turns above and below the points, as neighbours would touch; beside error bars
        data = data.assign(below=data["x"].rank(method="first") % 2 == 0)
        look: dict[str, Any] = {"fontSize": 11, "dy": alt.expr("datum.below ? 13 : -11")}
        look |= {"align": "left", "dx": 6} if "low" in data and not across else {}
        layers.append(drawn.mark_text(**look).encode(text="name:N", color=alt.value("theme:ink")))
    heading = title or (x if _of_names(data, "y") else y).heading
    return _chart(heading, data, layers, named | _shown(data, x, y, by), by)


def bars(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """A bar along x for each row, whose name is in y."""
    data = _by_role(table, x=x, y=y, series=by)
    bar = alt.Chart().mark_bar(height={"band": 0.72})
    bar = bar.encode(
        x=_position("x", data, x, zero=True), y=_position("y", data, y), color=_colour(by, data)
    )
    return _chart(title or x.heading, data, [bar], _shown(data, x, y, by), by)


def areas(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """Stacked areas: the parts of y over x."""
    data = _by_role(table, x=x, y=y, series=by)
    area = alt.Chart().mark_area(opacity=0.85)
    stacked = _position("y", data, y, zero=True).stack("zero")
    area = area.encode(x=_position("x", data, x), y=stacked, color=_colour(by, data))
    return _chart(title or y.heading, data, [area], _shown(data, x, y, by), by)


def spread(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """The distribution of x in each group of y: quartiles, 5 % and 95 %, mean, and its members.

    Of more than MOST_SHOWN members those with evenly spaced ranks in their group are drawn; the
    quantiles are of all of them.
    """
    data = _by_role(table, x=x, y=y, series=by)
    groups = data.groupby(["y", "series"], sort=False)["x"]
    boxes = groups.quantile(np.array([0.05, 0.25, 0.5, 0.75, 0.95])).unstack()
    boxes = boxes.assign(mean=groups.mean()).set_axis([*BOX], axis=1)
    boxes = boxes.assign(n=groups.size()).reset_index()
    dots = _thinned(data.sort_values("x"), "y", max(2, MOST_SHOWN // max(1, len(boxes))))
    # golden-ratio steps spread neighbours without random numbers
    dots = dots.assign(offset=(np.arange(len(dots)) * 0.618034 % 1).round(2))
    both = pd.concat([boxes, dots], ignore_index=True)

    def along(field: str) -> Any:
        return _position("x", both, x, field=field, padding=10)

    row = alt.Chart().encode(y=_position("y", both, y))
    drawn, size = row.encode(color=_colour(by, both)), {"band": 0.7}
    jitter = alt.expr("isValid(datum.offset) ? (datum.offset - 0.5) * 22 : 0")
    tick: Any = {"orient": "vertical", "height": size}
    layers = [
        drawn.mark_rule(strokeWidth=1.5).encode(x=along("p5"), x2="p95"),
        drawn.mark_bar(opacity=0.25, height=size).encode(x=along("p25"), x2="p75"),
        drawn.mark_point(filled=True, size=14, opacity=0.75, yOffset=jitter).encode(x=along("x")),
        row.mark_tick(thickness=3, color="theme:ink", **tick).encode(x=along("p50")),
        row.mark_tick(thickness=2, color="theme:accent", **tick).encode(x=along("mean")),
    ]
    columns = {"y": y, **{name: Axis(name, said, x.format) for name, said in BOX.items()}}
    columns |= {"n": Axis("n", "members")}
    return _chart(title or x.heading, both, layers, columns, by, step=2 * STEP)


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
    look |= {"labelOverlap": "parity", "labelSeparation": 4}
    places = {
        role: channel(
            f"{role}:O", title=axis.heading, sort=list(axis.names) or None, axis=alt.Axis(**look)
        )
        for role, channel, axis in (("x", alt.X, x), ("y", alt.Y, y))
    }
    cell = alt.Chart().mark_rect().encode(**places, color=shade)
    columns = {"x": x, "y": y, "value": value}
    return _chart(title or value.heading, data, [cell], columns, None)


def evenly_spaced(count: int, *, most: int) -> np.ndarray:
    """At most `most` of the places 0..count - 1, with the first and the last."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _thinned(data: pd.DataFrame, column: str, most: int) -> pd.DataFrame:
    """At most so many rows of each value of a column, evenly spaced."""
    parts = [part for _, part in data.groupby(column, sort=False)]
    thin = [part.iloc[evenly_spaced(len(part), most=most)] for part in parts]
    return pd.concat(thin) if thin else data


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
    drawn = _drawn(by, data)
    alone = len(drawn) < 2 or bool((data["y"] == data["series"]).all())
    legend = None if alone else alt.Legend(symbolType="stroke" if line else "circle")
    colours = alt.Scale(domain=[*drawn], range=[colour_of(place) for place in drawn.values()])
    return alt.Color("series:N", scale=colours, title=None, legend=legend)


def _dash(by: Series, data: pd.DataFrame) -> alt.StrokeDash:
    """The channel of dashes, in the legend of the colours."""
    drawn = _drawn(by, data)
    dashes = alt.Scale(domain=[*drawn], range=[dash_of(place) for place in drawn.values()])
    return alt.StrokeDash("series:N", scale=dashes, title=None)


def _drawn(by: Series, data: pd.DataFrame) -> dict[str, int]:
    return {name: by.places[name] for name in by.places if name in set(data["series"])}


def _position(
    role: str,
    data: pd.DataFrame,
    axis: Axis,
    *,
    field: str = "",
    padding: int | None = None,
    zero: bool = False,
) -> Any:
    """The channel of a position: of names or of numbers."""
    channel = alt.X if role == "x" else alt.Y
    title = axis.heading if role == "x" else None
    if _of_names(data, role):
        # in the order of the table: Vega would take that of the first layer, which may lack rows
        names = list(axis.names or data[role].drop_duplicates())
        look: Any = {"labelAngle": 0} if role == "x" else {"domain": False, "ticks": False}
        if role == "y" and _height_in_lines(names) > 1:
            look["labelExpr"] = "split(datum.label, ', ')"
        return channel(f"{role}:N", title=title, sort=names, axis=alt.Axis(**look))
    scale: Any = {"type": "log", "nice": False} if axis.log else {"zero": axis.zero or zero}
    scale |= _known(domain=axis.ends, padding=None if axis.ends else padding)
    step = 1 if axis.column in ("round", "rank") else None
    look = _known(format=axis.format, grid=False if role == "x" else None, tickMinStep=step)
    options: Any = {"title": title, "scale": alt.Scale(**scale), "axis": alt.Axis(**look)}
    return channel(f"{field or role}:Q", **options)


def _shown(data: pd.DataFrame, x: Axis, y: Axis, by: Series) -> dict[str, Axis]:
    """The columns that readers see; the series is left out where y already names it."""
    ends = {end: Axis(end, format=y.format or x.format) for end in ("low", "high") if end in data}
    if (data["series"] == data["y"]).all():
        return {"y": y, "x": x, **ends}
    return {"series": Axis("series", by.title or by.column), "x": x, "y": y, **ends}


def _chart(
    title: str,
    data: pd.DataFrame,
    layers: Sequence[alt.Chart],
    columns: Mapping[str, Axis],
    by: Series | None,
    *,
    step: int = STEP,
) -> Chart:
    """The layers as one chart; a row has a height that fits its name."""
    height = HEIGHT
    if by is None:
        height = max(60, min(STEP * data["y"].nunique(), 420))
    elif _of_names(data, "y"):
        names = list(data["y"].unique())
        height = 20 + max(step, LINE * (_height_in_lines(names) + 1)) * len(names)
    drawing = alt.layer(*layers, data=alt.NamedData("rows")).properties(height=height)
    return Chart(title, drawing, data, columns, by)


def _height_in_lines(names: Sequence[object]) -> int:
    """Lines of the tallest name; all are cut at their commas if one is long."""
    texts = [str(name) for name in names]
    longest = max(map(len, texts), default=0)
    return max(text.count(", ") for text in texts) + 1 if longest > LONG else 1
