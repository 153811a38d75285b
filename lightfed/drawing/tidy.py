"""Tables and axes that the figures of several papers share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pandas as pd

from lightfed.drawing.charts import Axis, metric_axis
from lightfed.results.groups import Group
from lightfed.results.run import Run
from lightfed.results.tables import readable
from lightfed.results.units import is_share

Along = Callable[[Run], "pd.Series[float]"]
MARGIN = 0.04  # of an axis, beside its values


def course_table(
    group: Group, column: str, series: str, along: Along | None = None
) -> pd.DataFrame:
    """`Group.course` with `series`, and `at`: what `along` gives by round, mean over the runs."""
    course = group.course(column)
    at = course.index.to_series()
    if along is not None:
        at = pd.concat([along(run) for run in group.runs], axis=1).loc[course.index].mean(axis=1)
    return course.assign(at=at, series=series).reset_index(names="round")


def stacked(parts: Sequence[pd.DataFrame], metric: str) -> pd.DataFrame:
    """One below the other; intervals of a share end at 0 and 1, beyond which it has no values."""
    table = pd.concat(parts, ignore_index=True)
    if is_share(metric):
        table[["low", "high"]] = table[["low", "high"]].clip(0.0, 1.0)
    return table


def score_row(group: Group, column: str, **also: object) -> dict[str, object]:
    """The final `value` of a metric with its interval from `low` to `high`."""
    mean, low, high, _ = group.interval(column)
    return {**also, "value": mean, "low": low, "high": high}


def metric_axis_of(column: str, table: pd.DataFrame) -> Axis:
    """The axis of final values, see `score_row`."""
    return metric_axis("value", column, table["value"], f"final {readable(column)}")


def common_axis(metric: str, tables: Iterable[pd.DataFrame], column: str, title: str) -> Axis:
    """One axis of a metric for several charts."""
    every = pd.concat(tables).reindex(columns=[column, "low", "high"])
    low, high = every.min().min(), every.max().max()
    axis = metric_axis(column, metric, every[column], title)
    margin = 0 if axis.log else MARGIN * (high - low)
    return replace(axis, ends=(low - margin, high + margin)) if high > low else axis


def file_name(kind: str, name: str) -> str:
    """Of a figure's files: `rounds-digits-diversity-3`."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
