"""HeteroFL's figure: the metric against the mean size of a client's model.

It has a point for each mixture of levels, as in Diao et al., ICLR 2021, arXiv:2010.01264, for the
global model and for the clients' own.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from lightfed.lab.drawing import marks
from lightfed.lab.drawing.marks import Axis, Figure, metric_axis, stacked
from lightfed.lab.results.groups import (
    Group,
    combination,
    gathered,
    grouped,
    level_counts,
    level_name,
    usual_metric,
)
from lightfed.lab.results.run import Run
from lightfed.lab.results.text import readable, sentence
from lightfed.lab.studies.shared import family, figure_of

CAPTION = (
    "A point is a mixture of levels at the mean number of parameters of its clients' models, with "
    "equal shares unless its name says otherwise. Bars: 95 % t intervals over seeds."
)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Draw a figure for every data set and model with at least two mixtures of levels."""
    for name, groups in gathered(grouped(runs), family).items():
        rows = []
        for group in groups:
            row = _row(group)
            if row is not None:
                rows.append(row)
        mixtures = {row["name"] for row in rows}
        if len(mixtures) > 1:
            yield _figure(name, pd.DataFrame(rows))


def _figure(name: str, rows: pd.DataFrame) -> Figure:
    """The figure of a data set and model.

    Args:
        name: The data set and the model.
        rows: What `_row` says of each experiment.
    """
    metric = usual_metric(rows["group"])
    largest = rows["largest"].max()
    sizes = rows["size"] / largest
    x = Axis(
        "at",
        f"mean parameters (100 %: {largest:,.0f})",
        format="~%",
        log=bool(sizes.max() > 8 * sizes.min()),
        ends=(sizes.min() / 1.3, 1.3),  # room for the names of points
    )
    rows = rows.assign(at=sizes, series=_series(list(rows["parts"])))
    places = {series: place for place, series in enumerate(sorted(set(rows["series"])))}

    charts = []
    for column in (f"global/{metric}", f"personal/{metric}"):
        scores = [group.score(column) for group in rows["group"]]
        means = pd.Series([mean for mean, _ in scores], index=rows.index)
        halves = pd.Series([half for _, half in scores], index=rows.index)
        table = rows.assign(value=means, low=means - halves, high=means + halves)
        table = table.dropna(subset="value")
        if len(table):
            y = metric_axis("value", column, table["value"], f"final {readable(column)}")
            table = stacked([table], column)
            title = sentence(column)
            charts.append(marks.points(table, x, y, places, name="name", title=title))

    title = f"{readable(metric)} against model size"
    return figure_of("sizes", name, title, charts, CAPTION, list(rows["group"]))


def _series(parts: Sequence[Sequence[str]]) -> list[str]:
    """The series of each experiment: the parts of its label that not all have, or its last one."""
    common = set.intersection(*map(set, parts))
    series = []
    for own in parts:
        telling = [part for part in own if part not in common]
        series.append(", ".join(telling) or own[-1])
    return series


def _row(group: Group) -> dict[str, Any] | None:
    """What the figure needs of an experiment; None if it has no levels, or its sizes are unknown.

    `name` is its mixture of levels. `parts` are the other parts of its label, and the widest level.
    `size` is the mean number of parameters of a client's model, `largest` that of the widest.
    """
    run = group.runs[0]
    counts = level_counts(run.settings)
    clients = pd.Series(run.group_sizes, dtype=float)
    sizes = pd.Series(run.environment.get("parameters", {}), dtype=float)
    if not counts or sizes.empty or clients.empty:
        return None

    mixture = combination(counts)
    parts = [part for part in group.label.split(", ") if part != mixture]
    parts.append(f"widest level {level_name(max(counts))}")
    return {
        "group": group,
        "parts": parts,
        "name": mixture,
        "size": (sizes * clients).sum() / clients.sum(),
        "largest": sizes.max(),
    }
