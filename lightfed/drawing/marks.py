"""Charts from tidy tables: lines with bands, points with error bars, spreads, bars, heat maps.

A table has a row for each mark; `low` and `high`, where it has them, are the ends of an interval.
Series can be switched off on the page by the parameter `hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from lightfed.drawing.charts import Axis, Chart, Series, looks

MOST_ROUNDS = 150  # points of a line; of more, evenly spaced ones are drawn
MOST_POINTS = 3000  # of all lines of a chart
FEW = 15  # points of a line that are marked
MOST_SHOWN = 1200  # members of all groups that are drawn as points
HEIGHT = 250
STEP = 24  # pixels of a row of bars or points
LINE = 15  # pixels of a line of such a row's name
LONG = 22  # characters of a name that is cut at its commas, or has no room beside a point
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BOX = {"p5": "5 %", "p25": "25 %", "p50": "median", "p75": "75 %", "p95": "95 %", "mean": "mean"}
ROWS = alt.NamedData("rows")  # what a page and a file replace by the data of the chart
HIDDEN = alt.param(name="hidden", value=[])
# drag with a mouse moves, Ctrl and wheel zooms: a plain wheel and a finger scroll the page
ZOOM = alt.selection_interval(
    name="zoom",
    bind="scales",
    translate="[pointerdown[event.pointerType == 'mouse'], window:pointerup] > window:pointermove!",
    zoom="wheel![event.ctrlKey]",
)
NEAREST = alt.selection_point(
    name="near", on="pointerover", nearest=True, clear="pointerout", empty=False
)


def lines(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """A line for each series through its measured points, with a band from `low` to `high`."""
    data = _by_role(table, x=x, y=y, series=by)
    parts = data.groupby("series", sort=False, group_keys=False)[list(data)]
    most = min(MOST_ROUNDS, max(30, MOST_POINTS // max(1, parts.ngroups)))
    data = parts.apply(lambda part: part.iloc[evenly_spaced(len(part), most=most)])
    few = len(data) == 0 or data.groupby("series").size().max() <= FEW
    columns, (colour, dash) = _shown(data, x, y, by), looks(by, data, lines=True)
    seen = alt.when(NEAREST).then(alt.value(1)).otherwise(alt.value(1 if few else 0))
    drawn = alt.Chart().encode(x=_position("x", data, x, padding=8), color=colour)
    measured = drawn.encode(y=_position("y", data, y, padding=6))
    line = measured.mark_line(strokeWidth=2).encode(strokeDash=dash).add_params(ZOOM)
    point = measured.mark_point(filled=True, size=40).add_params(NEAREST)
    layers = [line, point.encode(opacity=seen, tooltip=_tooltip(columns))]
    if "low" in data:
        ends = {"y": _position("y", data, y, field="low"), "y2": "high"}
        layers.insert(0, drawn.mark_area(opacity=0.16).encode(**ends))
    return _chart(title or y.heading, data, layers, columns, by)


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
    columns, (colour, dash) = named | _shown(data, x, y, by), looks(by, data, lines=connected)
    place = {"x": _position("x", data, x, padding=14), "y": _position("y", data, y, padding=14)}
    drawn = alt.Chart().encode(**place, color=colour)
    point = drawn.mark_point(filled=True, size=70).encode(tooltip=_tooltip(columns))
    if not (_of_names(data, "x") or _of_names(data, "y")):
        point = point.add_params(ZOOM)
    layers = [point]
    if connected:
        layers.insert(0, drawn.mark_line(strokeWidth=1.5).encode(strokeDash=dash))
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
    return _chart(heading, data, layers, columns, by)


def bars(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """A bar along x for each row, whose name is in y."""
    data = _by_role(table, x=x, y=y, series=by)
    columns = _shown(data, x, y, by)
    bar = (
        alt.Chart()
        .mark_bar(height={"band": 0.72})
        .encode(
            x=_position("x", data, x, zero=True),
            y=_position("y", data, y),
            color=looks(by, data)[0],
            tooltip=_tooltip(columns),
        )
    )
    return _chart(title or x.heading, data, [bar], columns, by)


def spread(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """The distribution of x in each group of y: quartiles, 5 % and 95 %, mean, and its members.

    Of more than MOST_SHOWN members those with evenly spaced ranks in their group are drawn; the
    quantiles are of all of them.
    """
    data = _by_role(table, x=x, y=y, series=by)
    groups = data.groupby(["y", "series"], sort=False)["x"]
    boxes = groups.quantile(np.array(QUANTILES)).unstack().assign(mean=groups.mean())
    boxes = boxes.set_axis(list(BOX), axis=1).assign(n=groups.size()).reset_index()
    ranked = data.sort_values("x").groupby("y", sort=False, group_keys=False)[list(data)]
    most = max(2, MOST_SHOWN // max(1, ranked.ngroups))
    dots = ranked.apply(lambda part: part.iloc[evenly_spaced(len(part), most=most)])
    # golden-ratio steps spread neighbours without random numbers
    dots = dots.assign(offset=(np.arange(len(dots)) * 0.618034 % 1).round(2))
    both = pd.concat([boxes, dots], ignore_index=True)
    columns = {"y": y, **{name: Axis(name, said, x.format) for name, said in BOX.items()}}

    def along(field: str) -> Any:
        return _position("x", both, x, field=field, padding=10)

    row, size = alt.Chart().encode(y=_position("y", both, y)), {"band": 0.7}
    drawn = row.encode(color=looks(by, both)[0])
    jitter = alt.expr("isValid(datum.offset) ? (datum.offset - 0.5) * 22 : 0")
    dot = drawn.mark_point(filled=True, size=14, opacity=0.75, yOffset=jitter)
    box = drawn.mark_bar(opacity=0.25, height=size).encode(x=along("p25"), x2="p75")
    stroke: Any = {"orient": "vertical", "height": size}
    layers = [
        drawn.mark_rule(strokeWidth=1.5).encode(x=along("p5"), x2="p95"),
        box.encode(tooltip=_tooltip(columns)),
        dot.encode(x=along("x"), tooltip=_tooltip({"y": y, "x": x})),
        row.mark_tick(thickness=3, color="theme:ink", **stroke).encode(x=along("p50")),
        row.mark_tick(thickness=2, color="theme:accent", **stroke).encode(x=along("mean")),
    ]
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
    columns = {"x": x, "y": y, "value": value}
    scale = _known(range=colours, interpolate="rgb", domainMid=middle, domain=value.ends)
    legend = _known(title=value.heading, gradientLength=180, format=value.format)
    shade = alt.Color("value:Q", scale=alt.Scale(**scale), legend=alt.Legend(**legend))
    cell = alt.Chart().mark_rect().encode(x=_cells("x", x), y=_cells("y", y), color=shade)
    cell = cell.encode(tooltip=_tooltip(columns))
    return _chart(title or value.heading, data, [cell], columns, None)


def areas(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """Stacked areas: the parts of y over x."""
    data = _by_role(table, x=x, y=y, series=by)
    columns = _shown(data, x, y, by)
    area = (
        alt.Chart()
        .mark_area(opacity=0.85)
        .encode(
            x=_position("x", data, x),
            y=_position("y", data, y, zero=True).stack("zero"),
            color=looks(by, data)[0],
            tooltip=_tooltip(columns),
        )
    )
    return _chart(title or y.heading, data, [area], columns, by)


def evenly_spaced(count: int, *, most: int) -> np.ndarray:
    """At most `most` of the places 0..count - 1, with the first and the last."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


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


def _cells(role: str, axis: Axis) -> Any:
    """The channel of a position among cells."""
    channel = alt.X if role == "x" else alt.Y
    look: Any = {"labelAngle": 0, "ticks": False, "domain": False, "grid": False}
    look |= {"labelOverlap": "parity", "labelSeparation": 4}
    names = list(axis.names) or None
    return channel(f"{role}:O", title=axis.heading, sort=names, axis=alt.Axis(**look))


def _shown(data: pd.DataFrame, x: Axis, y: Axis, by: Series) -> dict[str, Axis]:
    """The columns that readers see; the series is left out where y already names it."""
    ends = {end: Axis(end, format=y.format or x.format) for end in ("low", "high") if end in data}
    if (data["series"] == data["y"]).all():
        return {"y": y, "x": x, **ends}
    return {"series": Axis("series", by.title or by.column), "x": x, "y": y, **ends}


def _tooltip(columns: Mapping[str, Axis]) -> list[alt.Tooltip]:
    """Shares have more digits than on an axis."""
    precise = {"%": ".2%"}
    return [
        alt.Tooltip(field=name, title=axis.heading, format=precise.get(axis.format, axis.format))
        for name, axis in columns.items()
    ]


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
    drawing: Any = alt.layer(*layers, data=ROWS).properties(height=height)
    if by:
        drawing = drawing.add_params(HIDDEN)
        drawing = drawing.transform_filter("indexof(hidden, datum.series) < 0")
    return Chart(title, drawing, data, columns, by)


def _height_in_lines(names: Sequence[object]) -> int:
    """Lines of the tallest name; all are cut at their commas if one is long."""
    texts = [str(name) for name in names]
    longest = max(map(len, texts), default=0)
    return max(text.count(", ") for text in texts) + 1 if longest > LONG else 1
