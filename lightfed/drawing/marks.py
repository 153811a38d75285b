"""Charts from tidy tables: lines with bands, points with error bars, spreads, bars, heat maps.

A table has a row for each mark. Columns `low` and `high`, where it has them, are the ends of an
interval. Series can be switched off on the page by the parameter `hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from lightfed.drawing.charts import Axis, Chart, Series, colour, dash

MOST_ROUNDS = 150  # points of a line; of more, evenly spaced ones are drawn
MOST_POINTS = 3000  # of all lines of a chart
FEW = 15  # points of a line that are marked
MOST_SHOWN = 1200  # members of all groups that are drawn as points
HEIGHT = 250
STEP = 24  # pixels of a row of bars or points
LINE = 15  # pixels of a line of such a row's name
LONG = 22  # characters of a name that is cut at its commas, or has no room beside a point
QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
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
    height = _position("y", data, y, padding=6)
    drawn = alt.Chart().encode(x=_position("x", data, x, padding=8), color=colour(by, data))
    seen = alt.when(NEAREST).then(alt.value(1)).otherwise(alt.value(1 if few else 0))
    layers = [
        drawn.mark_line(strokeWidth=2).encode(y=height, strokeDash=dash(by, data)).add_params(ZOOM),
        drawn.mark_point(filled=True, size=40)
        .encode(y=height, opacity=seen, tooltip=_tooltip(*_shown(data, x, y, by)))
        .add_params(NEAREST),
    ]
    if "low" in data:
        ends = {"y": _position("y", data, y, field="low"), "y2": "high"}
        layers.insert(0, drawn.mark_area(opacity=0.16).encode(**ends))
    return _chart(title or y.heading, data, layers, *_shown(data, x, y, by), by)


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
    headings, formats = _shown(data, x, y, by)
    headings = ({"name": name} if name else {}) | headings
    place = {"x": _position("x", data, x, padding=14), "y": _position("y", data, y, padding=14)}
    drawn = alt.Chart().encode(**place, color=colour(by, data))
    point = drawn.mark_point(filled=True, size=70).encode(tooltip=_tooltip(headings, formats))
    if not (_of_names(data, "x") or _of_names(data, "y")):
        point = point.add_params(ZOOM)
    layers = [point]
    if connected:
        layers.insert(0, drawn.mark_line(strokeWidth=1.5).encode(strokeDash=dash(by, data)))
    if "low" in data:
        role, axis = ("x", x) if across else ("y", y)
        ends = {role: _position(role, data, axis, field="low"), f"{role}2": "high"}
        layers.insert(0, drawn.mark_rule(strokeWidth=1.5).encode(**ends))
    if name and len(data) <= FEW and data["name"].str.len().max() <= LONG:
        # by turns above and below the points, as neighbours would touch; beside error bars
        data = data.assign(below=data["x"].rank(method="first") % 2 == 0)
        look: dict[str, Any] = {"fontSize": 11, "dy": alt.expr("datum.below ? 13 : -11")}
        look |= {"align": "left", "dx": 6} if "low" in data and not across else {}
        text = {"text": alt.Text("name:N"), "color": alt.value("theme:ink")}
        layers.append(drawn.mark_text(**look).encode(**text))
    heading = title or (x if _of_names(data, "y") else y).heading
    return _chart(heading, data, layers, headings, formats, by)


def bars(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """A bar along x for each row; its name is in y, and an interval from `low` to `high` on it."""
    data = _by_role(table, x=x, y=y, series=by)
    shown = _shown(data, x, y, by)
    drawn = alt.Chart().encode(y=_position("y", data, y))
    bar = {"x": _position("x", data, x, zero=True), "color": colour(by, data)}
    layers = [drawn.mark_bar(height={"band": 0.72}).encode(**bar, tooltip=_tooltip(*shown))]
    if "low" in data:
        ends = {"x": _position("x", data, x, field="low", zero=True), "x2": "high"}
        layers.append(drawn.mark_rule(strokeWidth=1.5, color="theme:ink").encode(**ends))
    return _chart(title or x.heading, data, layers, *shown, by)


def spread(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """The distribution of x in each group of y: quartiles, 5 % and 95 %, mean, and its members.

    Of more than MOST_SHOWN members those with evenly spaced ranks in their group are drawn; the
    quantiles are of all of them.
    """
    data = _by_role(table, x=x, y=y, series=by)
    groups = data.groupby(["y", "series"], sort=False)["x"]
    boxes = groups.quantile(np.array(list(QUANTILES.values()))).unstack()
    boxes = boxes.set_axis(list(QUANTILES), axis=1)
    boxes = boxes.assign(mean=groups.mean(), n=groups.size()).reset_index()
    ranked = data.sort_values("x").groupby("y", sort=False, group_keys=False)[list(data)]
    most = max(2, MOST_SHOWN // max(1, ranked.ngroups))
    dots = ranked.apply(lambda part: part.iloc[evenly_spaced(len(part), most=most)])
    # golden-ratio steps spread neighbours without random numbers
    dots = dots.assign(offset=(np.arange(len(dots)) * 0.618034 % 1).round(2))
    both = pd.concat([boxes, dots], ignore_index=True)
    headings = {"y": y.heading, **{name: name.replace("p", "") + " %" for name in QUANTILES}}
    headings |= {"p50": "median", "mean": "mean", "n": "members"}
    formats = dict.fromkeys((*QUANTILES, "mean", "x"), x.format)

    def along(field: str) -> Any:
        return _position("x", both, x, field=field, padding=10)

    row = alt.Chart().encode(y=_position("y", both, y))
    drawn, size = row.encode(color=colour(by, both)), {"band": 0.7}
    jitter = alt.expr("isValid(datum.offset) ? (datum.offset - 0.5) * 22 : 0")
    stroke: Any = {"orient": "vertical", "height": size}
    whole, member = _tooltip(headings, formats), _tooltip({"y": y.heading, "x": x.heading}, formats)
    layers = [
        drawn.mark_rule(strokeWidth=1.5).encode(x=along("p5"), x2="p95"),
        drawn.mark_bar(opacity=0.25, height=size).encode(x=along("p25"), x2="p75", tooltip=whole),
        drawn.mark_point(filled=True, size=14, opacity=0.75, yOffset=jitter).encode(
            x=along("x"), tooltip=member
        ),
        row.mark_tick(thickness=3, color="theme:ink", **stroke).encode(x=along("p50")),
        row.mark_tick(thickness=2, color="theme:accent", **stroke).encode(x=along("mean")),
    ]
    return _chart(title or x.heading, both, layers, headings, formats, by, step=2 * STEP)


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
    headings = {"x": x.heading, "y": y.heading, "value": value.heading}
    formats = {"value": value.format}
    scale = _known(range=colours, interpolate="rgb", domainMid=middle, domain=value.ends)
    legend = _known(title=value.heading, gradientLength=180, format=value.format)
    shade = alt.Color("value:Q", scale=alt.Scale(**scale), legend=alt.Legend(**legend))
    cell = alt.Chart().mark_rect()
    cell = cell.encode(x=_cells("x", x), y=_cells("y", y), color=shade)
    cell = cell.encode(tooltip=_tooltip(headings, formats))
    height = max(60, min(STEP * data["y"].nunique(), 420))
    return _chart(title or value.heading, data, [cell], headings, formats, None, height=height)


def areas(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """Stacked areas: the parts of y over x."""
    data = _by_role(table, x=x, y=y, series=by)
    shown = _shown(data, x, y, by)
    height = _position("y", data, y, zero=True).stack("zero")
    drawn = alt.Chart().mark_area(opacity=0.85).encode(x=_position("x", data, x), y=height)
    drawn = drawn.encode(color=colour(by, data), tooltip=_tooltip(*shown))
    return _chart(title or y.heading, data, [drawn], *shown, by)


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
    return data.dropna(subset=list(columns)).reset_index(drop=True)


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
    scale: dict[str, Any] = {"type": "log", "nice": False}
    if not axis.log:
        scale = {"zero": axis.zero or zero}
    scale |= _known(domain=axis.ends, padding=None if axis.ends else padding)
    step = 1 if axis.column in ("round", "rank") else None
    look = _known(format=axis.format, grid=False if role == "x" else None, tickMinStep=step)
    name = f"{field or role}:Q"
    return channel(name, title=title, scale=alt.Scale(**scale), axis=alt.Axis(**look))


def _cells(role: str, axis: Axis) -> Any:
    """The channel of a position among cells."""
    channel = alt.X if role == "x" else alt.Y
    look: Any = {"labelAngle": 0, "ticks": False, "domain": False, "grid": False}
    look |= {"labelOverlap": "parity", "labelSeparation": 4}
    sort = list(axis.names) or None
    return channel(f"{role}:O", title=axis.heading, sort=sort, axis=alt.Axis(**look))


def _shown(
    data: pd.DataFrame, x: Axis, y: Axis, by: Series
) -> tuple[dict[str, str], dict[str, str]]:
    """Headings and formats of the columns that readers see."""
    ends = {end: end for end in ("low", "high") if end in data}
    headings = {"series": by.title or by.column, "x": x.heading, "y": y.heading, **ends}
    if (data["series"] == data["y"]).all():
        headings = {"y": y.heading, "x": x.heading, **ends}
    interval = y.format or x.format
    return headings, {"x": x.format, "y": y.format, "low": interval, "high": interval}


def _tooltip(headings: Mapping[str, str], formats: Mapping[str, str]) -> list[alt.Tooltip]:
    """Columns with their headings; shares with more digits than on an axis."""
    precise = {name: ".2%" if text == "%" else text for name, text in formats.items()}
    return [
        alt.Tooltip(field=name, title=title, **_known(format=precise.get(name)))
        for name, title in headings.items()
    ]


def _chart(
    title: str,
    data: pd.DataFrame,
    layers: Sequence[alt.Chart],
    headings: Mapping[str, str],
    formats: Mapping[str, str],
    by: Series | None,
    *,
    height: int = HEIGHT,
    step: int = STEP,
) -> Chart:
    """The layers as one chart; a row has a height that fits its name."""
    if by and _of_names(data, "y"):
        names = list(data["y"].unique())
        height = 20 + max(step, LINE * (_height_in_lines(names) + 1)) * len(names)
    drawing: Any = alt.layer(*layers, data=ROWS).properties(height=height)
    if by:
        drawing = drawing.add_params(HIDDEN)
        drawing = drawing.transform_filter("indexof(hidden, datum.series) < 0")
    return Chart(title, drawing, data, headings, formats, by)


def _height_in_lines(names: Sequence[object]) -> int:
    """Lines of the tallest name; all are cut at their commas if one is long."""
    texts = [str(name) for name in names]
    longest = max(map(len, texts), default=0)
    return max(text.count(", ") for text in texts) + 1 if longest > LONG else 1
