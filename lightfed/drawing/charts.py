"""What a figure is: charts of Altair with their data, and the series in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from lightfed.results.tables import readable
from lightfed.results.units import is_share

DECADES = 50  # ratio of largest to smallest value from which a loss has a log axis
SHARE = ".4~%"  # on axes, and precise enough for the numbers at a mark


@dataclass(frozen=True)
class Axis:
    """How a column of a table is shown.

    Attributes:
        column: its name.
        title: beside the axis and in tables; the readable name of the column by default.
        format: of numbers, in d3's language.
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
    return Axis(column, title or readable(metric), SHARE if is_share(metric) else "", log=log)


@dataclass(frozen=True)
class Series:
    """A column of names, each with the colour and dash of its place wherever it is drawn."""

    column: str
    places: Mapping[str, int]
    title: str = ""

    @classmethod
    def of(cls, column: str, names: Iterable[str], title: str = "") -> Series:
        """Colours in the order of the names."""
        return cls(column, {n: place for place, n in enumerate(dict.fromkeys(names))}, title)

    def drawn(self, data: pd.DataFrame) -> dict[str, int]:
        """The places of the names that are in `data`."""
        names = {*data["series"]}
        return {name: place for name, place in self.places.items() if name in names}


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: above it.
        drawing: without its data and width; colours by name, see `theme`.
        data: what it shows, with the columns that the drawing names.
        columns: of the data those that readers see, in their order, with heading and format.
        series: the names that can be switched off.
    """

    title: str
    drawing: alt.LayerChart
    data: pd.DataFrame
    columns: Mapping[str, Axis]
    series: Series | None = None

    @property
    def headings(self) -> dict[str, str]:
        return {name: axis.heading for name, axis in self.columns.items()}

    @property
    def spec(self) -> dict[str, Any]:
        """The drawing in Vega-Lite, without data and configuration."""
        spec: dict[str, Any] = self.drawing.to_dict(validate=False)
        return {key: value for key, value in spec.items() if key not in ("config", "data")}

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
        shown = self.data[list(self.columns)]
        said = list(self.headings.values())
        names = {c: h if said.count(h) == 1 else f"{h} {c}" for c, h in self.headings.items()}
        return shown.rename(columns=names)


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
        drawn = [chart.series.drawn(chart.data) for chart in self.charts if chart.series]
        return {name: place for one in drawn for name, place in one.items()}

    @property
    def table(self) -> pd.DataFrame:
        """The numbers of all its charts."""
        tables = {chart.title: chart.table for chart in self.charts}
        return pd.concat(tables, names=["chart"]).reset_index("chart")
