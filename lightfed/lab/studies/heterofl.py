"""HeteroFL's figure: the metric against the mean size of a client's model.

It has a point for each mixture of levels, as in Diao et al., ICLR 2021, arXiv:2010.01264, for the
global model and for the clients' own.
"""

from collections.abc import Iterator, Sequence

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
    """One for every data set and model with at least two mixtures of levels."""
    for name, groups in gathered(grouped(runs), family).items():
        rows = pd.DataFrame([row for group in groups if (row := _row(group))])
        if rows.empty or rows["name"].nunique() < 2:
            continue
        metric, largest = usual_metric(rows["group"]), rows["largest"].max()
        at, title = rows["size"] / largest, f"mean parameters (100 %: {largest:,.0f})"
        ends = (at.min() / 1.3, 1.3)  # room for the names of points
        x = Axis("at", title, format="~%", log=bool(at.max() > 8 * at.min()), ends=ends)
        common = set.intersection(*map(set, rows["parts"]))
        series = [", ".join(p for p in own if p not in common) or own[-1] for own in rows["parts"]]
        rows = rows.assign(at=at, series=series)
        places, charts = {name: i for i, name in enumerate(sorted({*series}))}, []
        for column in (f"global/{metric}", f"personal/{metric}"):
            mean, half = pd.DataFrame([g.score(column) for g in rows["group"]]).to_numpy().T
            table = rows.assign(value=mean, low=mean - half, high=mean + half)
            if len(table := table.dropna(subset="value")):
                y = metric_axis("value", column, table["value"], f"final {readable(column)}")
                table = stacked([table], column)
                charts.append(
                    marks.points(table, x, y, places, name="name", title=sentence(column))
                )
        title = f"{readable(metric)} against model size"
        yield figure_of("sizes", name, title, charts, CAPTION, list(rows["group"]))


def _row(group: Group) -> dict[str, object] | None:
    """An experiment; `parts` are those of its label that are no levels. None without sizes."""
    run = group.runs[0]
    counts, clients = level_counts(run.settings), pd.Series(run.group_sizes, dtype=float)
    sizes = pd.Series(run.environment.get("parameters", {}), dtype=float)
    if not counts or sizes.empty or clients.empty:
        return None
    mixture, widest = combination(counts), f"widest level {level_name(max(counts))}"
    return {
        "group": group,
        "parts": [*(part for part in group.label.split(", ") if part != mixture), widest],
        "name": mixture,
        "size": (sizes * clients).sum() / clients.sum(),
        "largest": sizes.max(),
    }
