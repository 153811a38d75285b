"""The layers of a chart in Vega-Lite: its data by role, positions, intervals and tooltips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightfed.drawing.charts import SCHEMA, Axis, Chart, Series

if TYPE_CHECKING:
    import pandas as pd

HEIGHT = 250
STEP = 24  # pixels of a row of bars or points
LINE = 15  # pixels of a line of such a row's name
LONG = 22  # characters of a name that is cut at its commas, or has no room beside a point
WHOLE = ("round", "rank")  # columns of whole numbers


def canonical(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """The columns by their role, without rows that have no place."""
    ends = {end: end for end in ("low", "high") if end in table and table[end].notna().any()}
    taken = {role: table[column] for role, column in {**names, **ends}.items()}
    data = table.assign(**taken)[list(taken)]
    numbers = data.select_dtypes("number").columns
    data = data.replace({name: {np.inf: np.nan, -np.inf: np.nan} for name in numbers})
    return data.dropna(subset=list(names)).reset_index(drop=True)


def headings_of(data: pd.DataFrame, x: Axis, y: Axis, by: Series) -> dict[str, str]:
    """Of the columns that readers see; the series is left out where y already names it."""
    ends = {end: end for end in ("low", "high") if end in data}
    places = {"x": x.heading, "y": y.heading}
    if (data["series"] == data["y"]).all():
        return {"y": y.heading, "x": x.heading, **ends}
    return {"series": by.title or by.column, **places, **ends}


def formats_of(x: Axis, y: Axis) -> dict[str, str]:
    """Of the columns; ends of intervals have that of the quantity."""
    ends = next((axis.format for axis in (y, x) if axis.format), "")
    return {"x": x.format, "y": y.format, "low": ends, "high": ends}


def tooltip(headings: Mapping[str, str], formats: Mapping[str, str]) -> list[dict[str, Any]]:
    """The channel of a tooltip: columns with their headings."""
    return [
        {"field": name, "title": title} | ({"format": _precise(text)} if text else {})
        for name, title in headings.items()
        for text in [formats.get(name, "")]
    ]


def _precise(text: str) -> str:
    return ".2%" if text == "%" else text


def named(data: pd.DataFrame, axis: Axis, role: str) -> bool:
    """Whether the axis is of names."""
    return bool(axis.names) or data[role].dtype.kind not in "iufb"


def position(
    role: str, axis: Axis, *, padding: int | None = None, zero: bool = False
) -> dict[str, Any]:
    """The channel of a position; `layered` says whether it is of names."""
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


def cells(role: str, axis: Axis) -> dict[str, Any]:
    """The channel of a position among cells."""
    look = {"title": axis.heading, "labelAngle": 0, "ticks": False, "domain": False, "grid": False}
    look |= {"labelOverlap": "parity", "labelSeparation": 4}
    sort = list(axis.names) or None
    return {"field": role, "type": "ordinal", "sort": sort, "axis": look}


def interval(mark: str, role: str, axis: Axis, look: Mapping[str, Any]) -> dict[str, Any]:
    """A layer from `low` to `high`."""
    low = {**position(role, axis), "field": "low"}
    ends = {role: low, f"{role}2": {"field": "high"}}
    return {"mark": {"type": mark, **look}, "encoding": ends}


def tick(name: str, row: Any, scale: Mapping[str, Any], look: Mapping[str, Any]) -> dict[str, Any]:
    """A layer of strokes at the column `name`."""
    place = {"y": row, "x": {**scale, "field": name}}
    return {"mark": {"type": "tick", "orient": "vertical", **look}, "encoding": place}


def layered(
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
            if role == "y" and _lines(names[role]) > 1:
                look |= {"labelExpr": "split(datum.label, ', ')"}
            # the order of the table: Vega would take that of the first layer, which may lack rows
            sort = changed[role].get("sort", names[role])
            field = {"field": changed[role]["field"], "type": "nominal", "sort": sort}
            changed[role] = field | {"axis": look}
    return changed


def with_rows(chart: Chart, y: Axis, data: pd.DataFrame, *, step: int = STEP) -> Chart:
    """A height that fits the rows, and the lines of their names, if y has names."""
    if not named(data, y, "y"):
        return chart
    names = data["y"].unique()
    return with_height(chart, 20 + max(step, LINE * (_lines(names) + 1)) * len(names))


def _lines(names: Iterable[object]) -> int:
    """Lines of the tallest name; all are cut at their commas if one is long."""
    texts = [str(name) for name in names]
    longest = max(map(len, texts), default=0)
    return max(text.count(", ") for text in texts) + 1 if longest > LONG else 1


def with_height(chart: Chart, height: int) -> Chart:
    return replace(chart, spec={**chart.spec, "height": height})
