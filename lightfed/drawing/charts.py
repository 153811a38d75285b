"""What a figure is: charts with their data, in Vega-Lite's language, and the series in them.

`marks` makes the charts; `export` writes figures as files, and `pages` puts them on a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightfed.drawing.theme import colour_of, dash_of
from lightfed.results.tables import readable
from lightfed.results.units import is_share

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.1.json"
VERSION = "6.1"  # of Vega-Lite, for the page and for files
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
    known = values[values.notna()]
    wide = len(known) > 0 and 0 < known.min() < known.max() / DECADES
    log = bool("perplexity" in metric or "loss" in metric) and wide
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

    def colour(self) -> dict[str, Any]:
        """The channel of colours."""
        scale = [colour_of(place) for place in self.places.values()]
        return self._channel(scale)

    def dash(self) -> dict[str, Any]:
        """The channel of dashes."""
        return self._channel([dash_of(place) for place in self.places.values()])

    def _channel(self, scale: Sequence[Any]) -> dict[str, Any]:
        names = {"domain": list(self.places), "range": scale}
        # a page has its own legend, with buttons; `export` adds Vega's
        return {"field": "series", "type": "nominal", "scale": names, "legend": None}


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: above it.
        spec: in Vega-Lite, without data and width; colours by name, see `theme`.
        data: what it shows, with the columns that the specification names.
        headings: of those columns that readers see, in their order.
        formats: of these columns, in d3's language.
        series: the names that can be switched off.
    """

    title: str
    spec: Mapping[str, Any]
    data: pd.DataFrame
    headings: Mapping[str, str]
    formats: Mapping[str, str] = field(default_factory=dict)
    series: Series | None = None

    @property
    def rows_are_series(self) -> bool:
        """Whether each series has a row of its own with its name, so that it needs no legend."""
        return self.series is not None and bool((self.data["y"] == self.data["series"]).all())

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
        charts = [(one.series, one.data["series"]) for one in self.charts if one.series]
        drawn = {name for _, names in charts for name in names}
        return {n: p for by, _ in charts for n, p in by.places.items() if n in drawn}

    @property
    def table(self) -> pd.DataFrame:
        """The numbers of all its charts."""
        import pandas as pd

        tables = {chart.title: chart.table for chart in self.charts}
        return pd.concat(tables, names=["chart"]).reset_index("chart")
