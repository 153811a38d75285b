"""HeteroFL's figure: the metric against the mean size of a client's model.

It has a point for each mixture of levels, as in Diao et al., ICLR 2021, arXiv:2010.01264, for the
global model and for the clients' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.marks import Axis, Figure, Series, metric_axis, stacked
from lightfed.results.groups import (
    Group,
    combination,
    grouped,
    level_counts,
    level_name,
    usual_metric,
)
from lightfed.results.run import Run
from lightfed.results.text import readable
from lightfed.studies.shared import family, figures_of

LOG_FROM = 8.0  # ratio of largest to smallest size above which an axis is logarithmic
CAPTION = (
    "A point is a mixture of levels at the mean number of parameters of its clients' models, with "
    "equal shares unless its name says otherwise. Bars: 95 % t intervals over seeds."
)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """One for every data set and model with clients of at least two widths."""
    every = pd.DataFrame([row for group in grouped(runs) if (row := _row(group))])
    for name, rows in every.groupby("family", sort=False) if len(every) else ():
        if len(set().union(*rows["levels"])) < 2:
            continue
        groups, metric = list(rows["group"]), usual_metric(rows["group"])
        largest, log = rows["largest"].max(), rows["size"].max() > LOG_FROM * rows["size"].min()
        x = Axis("at", f"mean parameters (100 %: {largest:,.0f})", format="~%", log=bool(log))
        shared = set.intersection(*map(set, rows["method"]))
        method = rows["method"].map(lambda parts, own=shared: [p for p in parts if p not in own])
        rows = rows.assign(series=(method + rows["widest"]).map(", ".join))
        by, charts = Series.of("series", sorted(rows["series"])), []
        for column in (f"global/{metric}", f"personal/{metric}"):
            mean, half = np.array([group.score(column) for group in groups]).T
            table = rows.assign(at=rows["size"] / largest, value=mean, low=mean - half)
            table = table.assign(high=mean + half).dropna(subset="value")
            if len(table):
                y = metric_axis("value", column, table["value"], f"final {readable(column)}")
                table = stacked([table], column)
                charts.append(marks.points(table, x, y, by, name="name", title=readable(column)))
        title = f"{readable(metric)} against model size"
        yield from figures_of("sizes", str(name), title, charts, CAPTION, groups)


def _row(group: Group) -> dict[str, object] | None:
    """An experiment; the method is the part of its label that is no level. None without sizes."""
    run = group.runs[0]
    counts, clients = level_counts(run.settings), pd.Series(run.group_sizes, dtype=float)
    sizes = pd.Series(run.environment.get("parameters", {}), dtype=float)
    if not counts or clients.empty or {*sizes.index} != {*clients.index}:
        return None
    mixture = combination(counts)
    method = [part for part in group.label.split(", ") if part != mixture]
    return {
        "group": group,
        "family": family(group),
        "method": method,
        "widest": [f"widest level {level_name(max(counts))}"],
        "name": mixture,
        "levels": {*counts},
        "size": (sizes * clients).sum() / clients.sum(),
        "largest": sizes.max(),
    }
