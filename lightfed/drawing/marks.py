"""Charts from tidy tables: lines with bands, points with error bars, spreads, bars, heat maps.

A table has a row for each mark. Columns `low` and `high`, where it has them, are the ends of an
interval. Series can be switched off on the page by the parameter `hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightfed.drawing.charts import SCHEMA, Axis, Chart, Series

if TYPE_CHECKING:
    import pandas as pd

HEIGHT = 250
STEP = 24  # pixels of a row of bars or points
MOST_ROUNDS = 250  # points of a line; of more, evenly spaced ones are drawn
MOST_POINTS = 4000  # of all lines of a chart
WHOLE = ("round", "rank")  # columns of whole numbers
FEW = 15  # points of a line that are marked
MOST_SHOWN = 400  # members of a group that are drawn as points
QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
# drag with a mouse moves, shift and wheel zooms: a plain wheel and a finger scroll the page
INK = {"color": "theme:ink"}
JITTER = {"yOffset": {"expr": "isValid(datum.offset) ? (datum.offset - 0.5) * 22 : 0"}}
ZOOM = {
    "name": "zoom",
    "select": {
        "type": "interval",
        "translate": (
            "[pointerdown[event.pointerType == 'mouse'], window:pointerup] > window:pointermove!"
        ),
        "zoom": "wheel![event.shiftKey]",
    },
    "bind": "scales",
}
NEAREST = {
    "name": "near",
    "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"},
}


def lines(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """A line for each series through its measured points, with a band from `low` to `high`."""
    data = _canonical(table, {"x": x.column, "y": y.column, "series": by.column})
    own = data.groupby("series", sort=False, group_keys=False)[list(data)]
    most = min(MOST_ROUNDS, max(30, MOST_POINTS // max(1, own.ngroups)))
    data = own.apply(lambda part: part.iloc[evenly_spaced(len(part), most=most)])
    few = len(data) == 0 or data.groupby("series").size().max() <= FEW
    shown, seen = {"value": 1 if few else 0}, {"param": "near", "empty": False, "value": 1}
    headings = _headings(data, x, y, by)
    point = {
        "mark": {"type": "point", "filled": True, "size": 40},
        "params": [NEAREST],
        "encoding": {
            "y": _position("y", y, padding=6),
            "opacity": {"condition": seen, **shown},
            "tooltip": _tooltip(headings, _formats(x, y)),
        },
    }
    line = {
        "mark": {"type": "line", "strokeWidth": 2},
        "params": [ZOOM],
        "encoding": {"y": _position("y", y, padding=6), "strokeDash": by.dash()},
    }
    band = _interval("area", "y", y, {"opacity": 0.16})
    across = {"x": _position("x", x, padding=8), "color": by.colour()}
    layers = [*([band] if "low" in data else []), line, point]
    return _chart(title or y.heading, data, headings, _formats(x, y), by, layers, across)


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

    Args:
        table: one row a point.
        x: a quantity, or names.
        y: a quantity, or names.
        by: the series.
        connected: whether a line goes through the points of a series.
        across: whether `low` and `high` are of x.
        name: a column with the name of each point, which stands beside it if they are few.
        title: of the chart.
    """
    named = {"name": name} if name else {}
    data = _canonical(table, {"x": x.column, "y": y.column, "series": by.column, **named})
    headings, formats = {**named, **_headings(data, x, y, by)}, _formats(x, y)
    place = {"x": _position("x", x, padding=14), "y": _position("y", y, padding=14)}
    point = {
        "mark": {"type": "point", "filled": True, "size": 70},
        "encoding": {**place, "tooltip": _tooltip(headings, formats)},
    }
    quantities = not (_named(data, x, "x") or _named(data, y, "y"))
    if quantities:
        point["params"] = [ZOOM]
    layers = [point]
    if connected:
        mark = {"type": "line", "strokeWidth": 1.5}
        layers.insert(0, {"mark": mark, "encoding": {**place, "strokeDash": by.dash()}})
    if "low" in data:
        own, other = ("x", "y") if across else ("y", "x")
        rule = _interval("rule", own, x if across else y, {"strokeWidth": 1.5})
        rule["encoding"][other] = place[other]
        layers.insert(0, rule)
    if name and len(data) <= FEW:
        text = {"type": "text", "align": "left", "dx": 6, "dy": -7, "fontSize": 11}
        layers.append({"mark": text, "encoding": {**place, "text": {"field": "name"}}})
    heading = title or (x if _named(data, y, "y") else y).heading
    chart = _chart(heading, data, headings, formats, by, layers, {"color": by.colour()})
    return _with_rows(chart, y, data)


def bars(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """A bar along x for each row; its name is in y, and an interval from `low` to `high` on it."""
    data = _canonical(table, {"x": x.column, "y": y.column, "series": by.column})
    headings, formats = _headings(data, x, y, by), _formats(x, y)
    place = {"y": _position("y", y), "x": _position("x", x, zero=True)}
    bar: dict[str, Any] = {
        "mark": {"type": "bar", "height": {"band": 0.72}},
        "encoding": {**place, "color": by.colour(), "tooltip": _tooltip(headings, formats)},
    }
    layers = [bar]
    if "low" in data:
        rule = _interval("rule", "x", replace(x, zero=True), {"strokeWidth": 1.5} | INK)
        layers.append(rule)
        rule["encoding"]["y"] = place["y"]
    chart = _chart(title or x.heading, data, headings, formats, by, layers, {})
    return _with_rows(chart, y, data)


def spread(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """The distribution of x in each group of y: quartiles, 5 % and 95 %, mean, and its members.

    Of more than MOST_SHOWN members those with evenly spaced ranks are drawn; the quantiles are of
    all of them.
    """
    import pandas as pd

    data = _canonical(table, {"x": x.column, "y": y.column, "series": by.column})
    groups = data.groupby(["y", "series"], sort=False)["x"]
    boxes = groups.quantile(np.array(list(QUANTILES.values()))).unstack()
    boxes = boxes.set_axis(list(QUANTILES), axis=1)
    boxes = boxes.assign(mean=groups.mean(), n=groups.size()).reset_index()
    ranked = data.sort_values("x").groupby("y", sort=False, group_keys=False)[list(data)]
    dots = ranked.apply(lambda own: own.iloc[evenly_spaced(len(own), most=MOST_SHOWN)])
    # golden-ratio steps spread neighbours without random numbers
    dots = dots.assign(offset=np.arange(len(dots)) * 0.618034 % 1)
    headings = {"y": y.heading, **{name: name.replace("p", "") + " %" for name in QUANTILES}}
    headings |= {"p50": "median", "mean": "mean", "n": "members"}
    formats = dict.fromkeys((*QUANTILES, "mean"), x.format) | {"x": x.format}
    row, scale = _position("y", y), _position("x", x, padding=10)
    colour = {"y": row, "color": by.colour()}
    tip = _tooltip(headings, formats)
    ends = {"x": {**scale, "field": "p5"}, "x2": {"field": "p95"}}
    box = {"x": {**scale, "field": "p25"}, "x2": {"field": "p75"}, "tooltip": tip}
    size = {"band": 0.7}
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": colour | ends},
        {"mark": {"type": "bar", "opacity": 0.25, "height": size}, "encoding": colour | box},
        {
            "mark": {"type": "point", "filled": True, "size": 14, "opacity": 0.75, **JITTER},
            "encoding": {
                **colour,
                "x": scale,
                "tooltip": _tooltip({"y": y.heading, "x": x.heading}, formats),
            },
        },
        _tick("p50", row, scale, {"thickness": 3, "height": size, **INK}),
        _tick("mean", row, scale, {"thickness": 2, "color": "theme:accent", "height": size}),
    ]
    both = pd.concat([boxes, dots], ignore_index=True)
    chart = _chart(title or x.heading, both, headings, formats, by, layers, {})
    return _with_rows(chart, y, boxes, step=2 * STEP)


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

    Args:
        table: one row a cell.
        x: from left to right.
        y: from top to bottom.
        value: the shade.
        colours: `ramp` or `diverging`.
        middle: the value in the middle of diverging colours.
        title: of the chart.
    """
    data = _canonical(table, {"x": x.column, "y": y.column, "value": value.column})
    headings = {"x": x.heading, "y": y.heading, "value": value.heading}
    formats = {"value": value.format}
    scale: dict[str, Any] = {"range": f"theme:{colours}", "interpolate": "rgb"}
    scale |= {"domainMid": middle} if middle is not None else {}
    scale |= {"domain": list(value.ends)} if value.ends else {}
    shade: dict[str, Any] = {"field": "value", "type": "quantitative", "scale": scale}
    shade["legend"] = {"title": value.heading, "orient": "bottom", "gradientLength": 180}
    shade["legend"] |= {"format": value.format} if value.format else {}
    cell = {
        "mark": {"type": "rect"},
        "encoding": {"color": shade, "tooltip": _tooltip(headings, formats)},
    }
    places = {"x": _cells("x", x), "y": _cells("y", y)}
    chart = _chart(title or value.heading, data, headings, formats, None, [cell], places)
    rows = data["y"].nunique()
    return _with_height(chart, max(60, min(STEP * rows, 420)))


def areas(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """Stacked areas: the parts of y over x."""
    data = _canonical(table, {"x": x.column, "y": y.column, "series": by.column})
    headings, formats = _headings(data, x, y, by), _formats(x, y)
    area = {
        "mark": {"type": "area", "opacity": 0.85},
        "encoding": {
            "y": {**_position("y", y, zero=True), "stack": "zero"},
            "tooltip": _tooltip(headings, formats),
        },
    }
    across = {"x": _position("x", x), "color": by.colour()}
    return _chart(title or y.heading, data, headings, formats, by, [area], across)


def evenly_spaced(count: int, *, most: int) -> np.ndarray:
    """At most `most` of the places 0..count - 1, with the first and the last."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _canonical(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """The columns by their role, without rows that have no place."""
    ends = {end: end for end in ("low", "high") if end in table and table[end].notna().any()}
    taken = {role: table[column] for role, column in {**names, **ends}.items()}
    data = table.assign(**taken)[list(taken)]
    numbers = data.select_dtypes("number").columns
    data = data.replace({name: {np.inf: np.nan, -np.inf: np.nan} for name in numbers})
    return data.dropna(subset=list(names)).reset_index(drop=True)


def _headings(data: pd.DataFrame, x: Axis, y: Axis, by: Series) -> dict[str, str]:
    ends = {end: end for end in ("low", "high") if end in data}
    places = {"x": x.heading, "y": y.heading}
    if (data["series"] == data["y"]).all():
        return {"y": y.heading, "x": x.heading, **ends}
    return {"series": by.title or by.column, **places, **ends}


def _formats(x: Axis, y: Axis) -> dict[str, str]:
    ends = next((axis.format for axis in (y, x) if axis.format), "")
    return {"x": x.format, "y": y.format, "low": ends, "high": ends}


def _tooltip(headings: Mapping[str, str], formats: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"field": name, "title": title} | ({"format": _precise(text)} if text else {})
        for name, title in headings.items()
        for text in [formats.get(name, "")]
    ]


def _precise(text: str) -> str:
    return ".2%" if text == "%" else text


def _named(data: pd.DataFrame, axis: Axis, role: str) -> bool:
    return bool(axis.names) or data[role].dtype.kind not in "iufb"


def _position(
    role: str, axis: Axis, *, padding: int | None = None, zero: bool = False
) -> dict[str, Any]:
    """The channel of a position; `_chart` says whether it is of names."""
    scale: dict[str, Any] = (
        {"type": "log", "nice": False} if axis.log else {"zero": axis.zero or zero}
    )
    if axis.ends:
        scale |= {"domain": list(axis.ends)}
    elif padding is not None:
        scale |= {"padding": padding}
    look: dict[str, Any] = {"title": axis.heading if role == "x" else None}
    look |= {"format": axis.format} if axis.format else {}
    if role == "x":
        look |= {"grid": False}
    names = {"sort": list(axis.names)} if axis.names else {}
    look |= {"tickMinStep": 1} if axis.column in WHOLE else {}
    return {"field": role, "type": "quantitative", "scale": scale, "axis": look, **names}


def _cells(role: str, axis: Axis) -> dict[str, Any]:
    look = {"title": axis.heading, "labelAngle": 0, "ticks": False, "domain": False, "grid": False}
    look |= {"labelOverlap": "greedy", "labelSeparation": 4}
    sort = list(axis.names) or None
    return {"field": role, "type": "ordinal", "sort": sort, "axis": look}


def _interval(mark: str, role: str, axis: Axis, look: Mapping[str, Any]) -> dict[str, Any]:
    low = {**_position(role, axis), "field": "low"}
    ends = {role: low, f"{role}2": {"field": "high"}}
    return {"mark": {"type": mark, **look}, "encoding": ends}


def _tick(name: str, row: Any, scale: Mapping[str, Any], look: Mapping[str, Any]) -> dict[str, Any]:
    place = {"y": row, "x": {**scale, "field": name}}
    return {"mark": {"type": "tick", "orient": "vertical", **look}, "encoding": place}


def _chart(
    title: str,
    data: pd.DataFrame,
    headings: Mapping[str, str],
    formats: Mapping[str, str],
    by: Series | None,
    layers: list[dict[str, Any]],
    shared: Mapping[str, Any],
) -> Chart:
    """Layers with what all of them share; columns of names get axes of names."""
    names = {
        role: list(dict.fromkeys(data[role]))
        for role in ("x", "y")
        if role in data and data[role].dtype.kind not in "iufb"
    }
    spec: dict[str, Any] = {
        "$schema": SCHEMA,
        "height": HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "params": [{"name": "hidden", "value": []}],
        "transform": [{"filter": "indexof(hidden, datum.series) < 0"}] if by else [],
        "encoding": _nominal(shared, names),
        "layer": [{**one, "encoding": _nominal(one["encoding"], names)} for one in layers],
    }
    return Chart(title, spec, data, headings, formats, by)


def _nominal(encoding: Mapping[str, Any], names: Mapping[str, list[str]]) -> dict[str, Any]:
    changed = dict(encoding)
    for role in names.keys() & changed.keys():
        if changed[role]["type"] == "quantitative":
            look = {key: value for key, value in changed[role]["axis"].items() if key != "format"}
            look |= {"labelAngle": 0} if role == "x" else {"domain": False, "ticks": False}
            # the order of the table: Vega would take that of the first layer, which may lack rows
            sort = changed[role].get("sort", names[role])
            field = {"field": changed[role]["field"], "type": "nominal", "sort": sort}
            changed[role] = field | {"axis": look}
    return changed


def _with_rows(chart: Chart, y: Axis, data: pd.DataFrame, *, step: int = STEP) -> Chart:
    """A height that fits the rows, if y has names."""
    if not _named(data, y, "y"):
        return chart
    return _with_height(chart, 20 + step * data["y"].nunique())


def _with_height(chart: Chart, height: int) -> Chart:
    return replace(chart, spec={**chart.spec, "height": height})
