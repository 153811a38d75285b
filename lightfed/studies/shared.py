"""What the figures of all papers share: file names, titles, and names of conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightfed.drawing.charts import Chart, Figure
from lightfed.drawing.tidy import file_name
from lightfed.results.groups import Group, synthetic_note
from lightfed.results.settings import variants


def figures_of(
    kind: str,
    name: str,
    title: str,
    charts: Sequence[Chart],
    caption: str,
    members: Sequence[Group],
) -> list[Figure]:
    """A figure of the charts, whose title says if its members used synthetic data; none without."""
    title = f"{name}: {title}{synthetic_note(members)}"
    return [Figure(file_name(kind, name), title, tuple(charts), caption)] if charts else []


def conditions(data: Sequence[str], options: Sequence[Mapping[str, str]]) -> list[str]:
    """Each data set, and in which options it differs from most others on the same data."""
    return [
        "; ".join(filter(None, pair)) for pair in zip(data, variants(options, data), strict=True)
    ]
