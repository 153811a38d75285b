"""What a figure is: charts of Altair with their data, and the series in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import pandas as pd

from lightfed.drawing.theme import colour_of, dash_of
from lightfed.results.tables import readable
from lightfed.results.units import is_share

DECADES = 50  # ratio of largest to smallest value from which a loss has a log axis


@dataclass(frozen=True)
class Axis:
    """How a column of a table is shown.

    Attributes:
        column: its name.
        title: beside the axis and in tables; the readable name of the column by default.
        format: of numbers, in d3's language; `.0%` for shares.
        log: whether the axis is logarithmic.
        zero: whether it begins at zero.
        names: of a column of names, in their order on the axis; by default that of the table.
        ends: of the axis; chosen from the values by default.
    """

    column: str
    title: str = ""
    format: str = ""
    log: bool = False
    zero: bool = False
    names: tuple[str, ...] = ()
    ends: tuple[float, float] | None = None

    @property
    def heading(self) -> str:
        return self.title or readable(self.column)


def metric_axis(column: str, metric: str, values: pd.Series[float], title: str = "") -> Axis:
    """An axis of a metric: shares in per cent, losses and perplexities over decades in log."""
    known = values.dropna()
    wide = len(known) > 0 and 0 < known.min() < known.max() / DECADES
    log = ("perplexity" in metric or "loss" in metric) and wide
    return Axis(column, title or readable(metric), "%" if is_share(metric) else "", log=log)


@dataclass(frozen=True)
class Series:
    """A column of names, each with the colour and dash of its place wherever it is drawn."""

    column: str
    places: Mapping[str, int]
    title: str = ""

    @classmethod
    def of(cls, column: str, names: Iterable[str], title: str = "") -> Series:
        """Colours in the order of the names."""
        ordered = dict.fromkeys(names)
        return cls(column, {name: place for place, name in enumerate(ordered)}, title)


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: above it.
        drawing: without its data and width; colours by name, see `theme`.
        data: what it shows, with the columns that the drawing names.
        headings: of those columns that readers see, in their order.
        formats: of these columns, in d3's language.
        series: the names that can be switched off.
    """

    title: str
    drawing: alt.LayerChart
    data: pd.DataFrame
    headings: Mapping[str, str]
    formats: Mapping[str, str] = field(default_factory=dict)
    series: Series | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """The drawing in Vega-Lite, without data and configuration."""
        spec: dict[str, Any] = self.drawing.to_dict(validate=False)
        return {key: value for key, value in spec.items() if key not in ("config", "data")}

    @property
    def table(self) -> pd.DataFrame:
        """What a reader may want as numbers."""
        shown = self.data[list(self.headings)]
        numbers = shown.select_dtypes("number")
        return shown[numbers.notna().any(axis=1)].rename(columns=dict(self.headings))


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
        charts = [(chart.series, chart.data["series"]) for chart in self.charts if chart.series]
        drawn = {name for _, names in charts for name in names}
        return {n: p for by, _ in charts for n, p in by.places.items() if n in drawn}

    @property
    def table(self) -> pd.DataFrame:
        """The numbers of all its charts."""
        tables = {chart.title: chart.table for chart in self.charts}
        return pd.concat(tables, names=["chart"]).reset_index("chart")


def colour(by: Series, data: pd.DataFrame) -> alt.Color:
    """The channel of colours; a legend in files, as a page has its own with buttons."""
    drawn = _drawn(by, data)
    scale = alt.Scale(domain=list(drawn), range=[colour_of(place) for place in drawn.values()])
    rows_are_series = bool((data["y"] == data["series"]).all())
    legend = None if len(drawn) < 2 or rows_are_series else alt.Undefined
    return alt.Color("series:N", scale=scale, title=None, legend=legend)


def dash(by: Series, data: pd.DataFrame) -> alt.StrokeDash:
    """The channel of dashes."""
    drawn = _drawn(by, data)
    scale = alt.Scale(domain=list(drawn), range=[dash_of(place) for place in drawn.values()])
    legend = None if len(drawn) < 2 else alt.Undefined
    return alt.StrokeDash("series:N", scale=scale, title=None, legend=legend)


def _drawn(by: Series, data: pd.DataFrame) -> dict[str, int]:
    names = set(data["series"])
    return {name: place for name, place in by.places.items() if name in names}
