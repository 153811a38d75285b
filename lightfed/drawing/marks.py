"""Charts from tidy tables: lines with bands, points with error bars, spreads, bars, heat maps.

A table has a row for each mark. Columns `low` and `high`, where it has them, are the ends of an
interval. Series can be switched off on the page by the parameter `hidden`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightfed.drawing.charts import Axis, Chart, Series
from lightfed.drawing.layers import (
    LONG,
    STEP,
    canonical,
    cells,
    formats_of,
    headings_of,
    interval,
    layered,
    named,
    position,
    tick,
    tooltip,
    with_height,
    with_rows,
)

if TYPE_CHECKING:
    import pandas as pd

MOST_ROUNDS = 150  # points of a line; of more, evenly spaced ones are drawn
MOST_POINTS = 3000  # of all lines of a chart
FEW = 15  # points of a line that are marked
MOST_SHOWN = 1200  # members of all groups that are drawn as points
QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
INK = {"color": "theme:ink"}
JITTER = {"yOffset": {"expr": "isValid(datum.offset) ? (datum.offset - 0.5) * 22 : 0"}}
# names of points stand above and below them by turns, as neighbours would touch; beside error bars
NAMES = {"type": "text", "fontSize": 11, "dy": {"expr": "datum.below ? 13 : -11"}}
BESIDE = {"align": "left", "dx": 6}
# drag with a mouse moves, shift and wheel zooms: a plain wheel and a finger scroll the page
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
    data = canonical(table, {"x": x.column, "y": y.column, "series": by.column})
    own = data.groupby("series", sort=False, group_keys=False)[list(data)]
    most = min(MOST_ROUNDS, max(30, MOST_POINTS // max(1, own.ngroups)))
    data = own.apply(lambda part: part.iloc[evenly_spaced(len(part), most=most)])
    few = len(data) == 0 or data.groupby("series").size().max() <= FEW
    shown, seen = {"value": 1 if few else 0}, {"param": "near", "empty": False, "value": 1}
    headings = headings_of(data, x, y, by)
    point = {
        "mark": {"type": "point", "filled": True, "size": 40},
        "params": [NEAREST],
        "encoding": {
            "y": position("y", y, padding=6),
            "opacity": {"condition": seen, **shown},
            "tooltip": tooltip(headings, formats_of(x, y)),
        },
    }
    line = {
        "mark": {"type": "line", "strokeWidth": 2},
        "params": [ZOOM],
        "encoding": {"y": position("y", y, padding=6), "strokeDash": by.dash()},
    }
    band = interval("area", "y", y, {"opacity": 0.16})
    across = {"x": position("x", x, padding=8), "color": by.colour()}
    layers = [*([band] if "low" in data else []), line, point]
    return layered(title or y.heading, data, headings, formats_of(x, y), by, layers, across)


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
    extra = {"name": name} if name else {}
    data = canonical(table, {"x": x.column, "y": y.column, "series": by.column, **extra})
    headings, formats = {**extra, **headings_of(data, x, y, by)}, formats_of(x, y)
    place = {"x": position("x", x, padding=14), "y": position("y", y, padding=14)}
    point = {
        "mark": {"type": "point", "filled": True, "size": 70},
        "encoding": {**place, "tooltip": tooltip(headings, formats)},
    }
    quantities = not (named(data, x, "x") or named(data, y, "y"))
    if quantities:
        point["params"] = [ZOOM]
    layers = [point]
    if connected:
        mark = {"type": "line", "strokeWidth": 1.5}
        layers.insert(0, {"mark": mark, "encoding": {**place, "strokeDash": by.dash()}})
    if "low" in data:
        own, other = ("x", "y") if across else ("y", "x")
        rule = interval("rule", own, x if across else y, {"strokeWidth": 1.5})
        rule["encoding"][other] = place[other]
        layers.insert(0, rule)
    if name and len(data) <= FEW and data["name"].str.len().max() <= LONG:
        data = data.assign(below=data["x"].rank(method="first") % 2 == 0)
        text = {"text": {"field": "name"}, "color": {"value": INK["color"]}}
        mark = NAMES | (BESIDE if "low" in data and not across else {})
        layers.append({"mark": mark, "encoding": {**place, **text}})
    heading = title or (x if named(data, y, "y") else y).heading
    chart = layered(heading, data, headings, formats, by, layers, {"color": by.colour()})
    return with_rows(chart, y, data)


def bars(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """A bar along x for each row; its name is in y, and an interval from `low` to `high` on it."""
    data = canonical(table, {"x": x.column, "y": y.column, "series": by.column})
    headings, formats = headings_of(data, x, y, by), formats_of(x, y)
    place = {"y": position("y", y), "x": position("x", x, zero=True)}
    bar: dict[str, Any] = {
        "mark": {"type": "bar", "height": {"band": 0.72}},
        "encoding": {**place, "color": by.colour(), "tooltip": tooltip(headings, formats)},
    }
    layers = [bar]
    if "low" in data:
        rule = interval("rule", "x", replace(x, zero=True), {"strokeWidth": 1.5} | INK)
        layers.append(rule)
        rule["encoding"]["y"] = place["y"]
    chart = layered(title or x.heading, data, headings, formats, by, layers, {})
    return with_rows(chart, y, data)


def spread(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """The distribution of x in each group of y: quartiles, 5 % and 95 %, mean, and its members.

    Of more than MOST_SHOWN members those with evenly spaced ranks in their group are drawn; the
    quantiles are of all of them.
    """
    import pandas as pd

    data = canonical(table, {"x": x.column, "y": y.column, "series": by.column})
    groups = data.groupby(["y", "series"], sort=False)["x"]
    boxes = groups.quantile(np.array(list(QUANTILES.values()))).unstack()
    boxes = boxes.set_axis(list(QUANTILES), axis=1)
    boxes = boxes.assign(mean=groups.mean(), n=groups.size()).reset_index()
    ranked = data.sort_values("x").groupby("y", sort=False, group_keys=False)[list(data)]
    most = max(2, MOST_SHOWN // max(1, ranked.ngroups))
    dots = ranked.apply(lambda own: own.iloc[evenly_spaced(len(own), most=most)])
    # golden-ratio steps spread neighbours without random numbers
    dots = dots.assign(offset=(np.arange(len(dots)) * 0.618034 % 1).round(2))
    headings = {"y": y.heading, **{name: name.replace("p", "") + " %" for name in QUANTILES}}
    headings |= {"p50": "median", "mean": "mean", "n": "members"}
    formats = dict.fromkeys((*QUANTILES, "mean"), x.format) | {"x": x.format}
    row, scale = position("y", y), position("x", x, padding=10)
    colour = {"y": row, "color": by.colour()}
    tip = tooltip(headings, formats)
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
                "tooltip": tooltip({"y": y.heading, "x": x.heading}, formats),
            },
        },
        tick("p50", row, scale, {"thickness": 3, "height": size, **INK}),
        tick("mean", row, scale, {"thickness": 2, "color": "theme:accent", "height": size}),
    ]
    both = pd.concat([boxes, dots], ignore_index=True)
    chart = layered(title or x.heading, both, headings, formats, by, layers, {})
    return with_rows(chart, y, boxes, step=2 * STEP)


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
    data = canonical(table, {"x": x.column, "y": y.column, "value": value.column})
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
        "encoding": {"color": shade, "tooltip": tooltip(headings, formats)},
    }
    places = {"x": cells("x", x), "y": cells("y", y)}
    chart = layered(title or value.heading, data, headings, formats, None, [cell], places)
    rows = data["y"].nunique()
    return with_height(chart, max(60, min(STEP * rows, 420)))


def areas(table: pd.DataFrame, x: Axis, y: Axis, by: Series, *, title: str = "") -> Chart:
    """Stacked areas: the parts of y over x."""
    data = canonical(table, {"x": x.column, "y": y.column, "series": by.column})
    headings, formats = headings_of(data, x, y, by), formats_of(x, y)
    area = {
        "mark": {"type": "area", "opacity": 0.85},
        "encoding": {
            "y": {**position("y", y, zero=True), "stack": "zero"},
            "tooltip": tooltip(headings, formats),
        },
    }
    across = {"x": position("x", x), "color": by.colour()}
    return layered(title or y.heading, data, headings, formats, by, [area], across)


def evenly_spaced(count: int, *, most: int) -> np.ndarray:
    """At most `most` of the places 0..count - 1, with the first and the last."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))
