"""HeteroFL's figures: the metric against the mean size of a client's model.

One has a point per combination of levels, one a line per pair of levels with the share of the wide
one growing from 0 to 1, and one compares fixed levels with levels redrawn every round. Each has a
chart for a kind of metric and a partition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Chart, Figure, Series
from lightfed.drawing.tidy import metric_axis_of, score_row, stacked
from lightfed.results.groups import Group, grouped, usual_metric
from lightfed.results.mixtures import combination, even, level_counts, level_name
from lightfed.results.run import Run
from lightfed.results.settings import options, variants
from lightfed.results.tables import readable
from lightfed.studies.shared import figures_of

LINE_FROM = 3  # shares of a pair of levels, including 0 and 1, that make a line
LOG_FROM = 8.0  # ratio of largest to smallest size above which an axis is logarithmic
WAYS = ("fixed level", "level redrawn every round")
MODEL = re.compile(r"model\.clients\.\d+\.model\.class_path")
UNSPOKEN = re.compile(r"^model\.clients\.0\.model\.")
# options of the combination and its data set; all other options of the model form the variant
NO_VARIANT = re.compile(
    r"trainer\.|data\.|model\.(clients\.(?!0\.model\.)"
    r"|clients\.0\.model\.(class_path$|init_args\.(rate$|num_classes$|input_shape))"
    r"|algorithm\.(class_path$|init_args\.(assignment$|level_weights)))"
)
# by kind of figure: the end of its title, and how to read it
TEXTS = {
    "sizes": (
        "against model size",
        "A point is a combination of levels at the mean number of parameters of its clients' "
        "models, with equal shares unless its name says otherwise. Bars: 95 % t intervals over "
        "seeds.",
    ),
    "shares": (
        "between two levels",
        "Along a line the share of the wider level grows from left to right, from 0 to 1.",
    ),
    "dynamic": (
        "with fixed and with redrawn levels",
        "Fixed: a client keeps its level. Redrawn: it draws a new level in every round.",
    ),
}


def figures(runs: Sequence[Run], *, target: float | None = None) -> list[Figure]:
    """Those of every data set and model with clients of at least two widths."""
    rows = [row for group in grouped(runs) if (row := _row(group))]
    found: list[Figure] = []
    for _, family in pd.DataFrame(rows).groupby("family", sort=False) if rows else ():
        if family["levels"].str.split("-").explode().nunique() > 1:
            found += _figures(_named(family))
    return found


def partition_of(run: Run) -> str:
    """The partition scheme with its arguments where it is known, else its class."""
    chosen = run.settings.get("data.partition.class_path", "").rpartition(".")[2]
    return str(run.partition.meta.get("scheme", chosen)) if run.partition else chosen


def _row(group: Group) -> dict[str, object] | None:
    """An experiment; None without widths or parameters, or with different models."""
    run = group.runs[0]
    settings, counts = run.settings, level_counts(run.settings)
    models = {value for key, value in settings.items() if MODEL.fullmatch(key)}
    parameters = run.environment.get("parameters")
    clients = pd.Series(run.group_sizes, dtype=float)
    sizes = pd.Series(parameters if isinstance(parameters, dict) else {}, dtype=float)
    if not counts or len(models) != 1 or clients.empty or {*sizes.index} != {*clients.index}:
        return None
    return {
        "group": group,
        "family": f"{group.data}, {models.pop().rpartition('.')[2]}",
        "partition": partition_of(run),
        "algorithm": group.algorithm,
        "levels": "-".join(map(level_name, counts)),
        "name": combination(counts),
        "even": even(counts),
        "way": WAYS[settings.get("model.algorithm.init_args.assignment") == "dynamic"],
        "size": (sizes * clients).sum() / clients.sum(),
        "largest": sizes.max(),
        "options": options(settings, but=NO_VARIANT, unspoken=UNSPOKEN),
    }


def _named(family: pd.DataFrame) -> pd.DataFrame:
    """With sizes relative to the largest model, and how algorithms and options differ."""
    alike = list(zip(family["algorithm"], family["partition"], strict=True))
    variant = pd.Series(variants(list(family["options"]), alike), index=family.index)
    several = family["algorithm"].nunique() > 1
    return family.assign(
        largest=family["largest"].max(),
        size=family["size"] / family["largest"].max(),
        variant=(", " + variant).where(variant != "", ""),
        algorithm=family["algorithm"] + ", " if several else "",
    )


def _figures(family: pd.DataFrame) -> list[Figure]:
    lines = _lines(family)
    widest = "widest level " + family["levels"].str.partition("-")[0]
    fixed = family["way"] == WAYS[0]
    points = family.assign(
        series=family["algorithm"] + widest.where(fixed, WAYS[1]),
        name=family["name"] + family["variant"],
    )
    if len(lines):  # a line shows unequal shares
        points = points[points["even"] | ~points.index.isin(lines.index)]
    pairs = points[points["even"] & (points["levels"].str.count("-") == 1)]
    alike = pairs.groupby(["algorithm", "partition", "name"])
    both = pairs[alike["way"].transform("nunique") == 2].assign(series=lambda rows: rows["way"])
    drawn = {
        "sizes": _charts(points, _by_size) if points["size"].nunique() > 1 else [],
        "shares": _charts(lines, partial(_by_size, connected=True)),
        "dynamic": _charts(both.sort_values("levels"), _across),
    }
    name, groups = family["family"].iloc[0], list(family["group"])
    found: list[Figure] = []
    for kind, charts in drawn.items():
        title, caption = TEXTS[kind]
        title = f"{readable(usual_metric(groups))} {title}"
        found += figures_of(kind, name, title, charts, caption, groups)
    return found


def _lines(family: pd.DataFrame) -> pd.DataFrame:
    """Pairs of levels that were mixed in unequal shares, and their ends, which may be missing."""
    lines = []
    keys = ["algorithm", "partition", "variant"]
    pairs = family[family["levels"].str.count("-") == 1]
    for (levels, way, *setting), mixed in pairs.groupby(["levels", "way", *keys]):
        alike = (family[keys] == setting).all(axis=1)
        ends = family[alike & family["levels"].isin(str(levels).split("-"))]
        line = pd.concat([mixed.assign(name=""), ends])
        if line["size"].nunique() >= LINE_FROM and not mixed["even"].all():
            redrawn = f", {WAYS[1]}" * (way == WAYS[1])
            lines.append(line.assign(series=f"{setting[0]}{levels}{setting[2]}{redrawn}"))
    return pd.concat(lines).sort_values("size") if lines else family[:0]


def _charts(
    rows: pd.DataFrame, draw: Callable[[pd.DataFrame, Axis, Series, str], Chart]
) -> list[Chart]:
    """A chart for each kind of metric and partition that was measured."""
    charts: list[Chart] = []
    if rows.empty:
        return charts
    by, metric = Series.of("series", sorted(rows["series"])), usual_metric(rows["group"])
    for kind, (partition, own) in product(("global", "personal"), rows.groupby("partition")):
        column = f"{kind}/{metric}"
        scores = pd.DataFrame([score_row(g, column) for g in own["group"]], index=own.index)
        table = stacked([own.join(scores).dropna(subset="value")], column)
        if len(table):
            axis, title = metric_axis_of(column, table), f"{readable(column)}, {partition}"
            charts.append(draw(table, axis, by, title))
    return charts


def _by_size(
    table: pd.DataFrame, axis: Axis, by: Series, title: str, *, connected: bool = False
) -> Chart:
    largest, log = table["largest"].iloc[0], table["size"].max() > LOG_FROM * table["size"].min()
    x = Axis("size", f"mean parameters (100 %: {largest:,.0f})", format="~%", log=bool(log))
    return marks.points(table, x, axis, by, connected=connected, name="name", title=title)


def _across(table: pd.DataFrame, axis: Axis, by: Series, title: str) -> Chart:
    return marks.points(table, axis, Axis("name", "levels"), by, across=True, title=title)
