"""Pictures of a family of federations: the metric against the mean size of a client's model.

One has a point per combination of levels, one a line per pair of levels with the share of the wide
one growing from 0 to 1, and one compares fixed levels with levels redrawn every round. Each has a
chart for a kind of metric and a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Chart, Figure, Series
from lightfed.drawing.tidy import file_name, metric_axis_of, score_row, stacked
from lightfed.results.settings import gathered
from lightfed.results.tables import readable
from lightfed.results.units import count_text
from lightfed.studies.heterofl.levels import Family, Mixture

KINDS = ("global", "personal")
LINE_FROM = 3  # shares of a pair of levels, including 0 and 1, that make a line
MARGIN = 0.07  # of an axis
LOG_FROM = 8.0  # ratio of largest to smallest size above which an axis is logarithmic
FIXED, REDRAWN = "fixed level", "level redrawn every round"


def sizes_figure(family: Family) -> Figure | None:
    """A point for each combination of levels; None unless two of them differ in size.

    Unequal shares of a pair are left out if a line shows them.
    """
    on_lines = [m for line in pair_lines(family) for m in line.mixtures if not m.even]
    drawn = [mixture for mixture in family.members if mixture not in on_lines]
    if len({mixture.size for mixture in drawn}) < 2:
        return None
    # Other methods look as on the rest of the page, and levels unlike them.
    others = {m.algorithm: m.group.method_place for m in drawn if m.algorithm != family.algorithm}
    own = {f"widest level {name}": family.place(name) for name in family.levels}
    own[REDRAWN] = 1 + max(own.values())
    free = sorted({*range(1 + own[REDRAWN] + len(others))} - {*others.values()})
    places = {name: free[place] for name, place in own.items()}
    by = Series("series", places | others, "federation")

    def kind(mixture: Mixture) -> str:
        if mixture.algorithm != family.algorithm:
            return mixture.algorithm
        return REDRAWN if mixture.dynamic else f"widest level {mixture.names[0]}"

    def chart(own: list[Mixture], column: str, title: str) -> Chart:
        fixed = {_text(m, family) for m in own if not m.dynamic}
        names = {m: _text(m, family) for m in own}
        # what the series says already is not said beside the point
        names = {
            m: "" if (m.dynamic and t in fixed) or kind(m) in others else t
            for m, t in names.items()
        }
        rows = [
            score_row(m.group, column, series=kind(m), size=_size(m, family), name=names[m])
            for m in own
        ]
        table = stacked([pd.DataFrame(rows)], column)
        return marks.points(
            table, _size_axis(family, table), metric_axis_of(column, table), by,
            name="name", title=title,
        )  # fmt: skip

    caption = (
        "A point is a combination of levels, with equal shares of the clients unless its name says "
        "otherwise. Its position is the mean number of parameters of the clients' models. Bars: "
        "95 % t intervals over seeds."
    )
    return _figure("sizes", family, drawn, chart, "against model size", caption)


def shares_figure(family: Family) -> Figure | None:
    """A line for each pair of levels that was mixed in unequal shares; None without any."""
    found = pair_lines(family)
    by = Series.of("series", [line.label for line in found], "levels")
    drawn = list(dict.fromkeys(mixture for line in found for mixture in line.mixtures))

    def chart(own: list[Mixture], column: str, title: str) -> Chart:
        rows = [
            _point(m, column, family, line.label)
            for line in found
            for m in line.mixtures
            if m in own
        ]
        table = stacked([pd.DataFrame(rows)], column)
        return marks.points(
            table, _size_axis(family, table), metric_axis_of(column, table), by,
            connected=True, name="name", title=title,
        )  # fmt: skip

    caption = (
        "Along a line the share of the wider level grows from left to right; at its ends all "
        "clients are of one level."
    )
    return _figure("shares", family, drawn, chart, "between two levels", caption)


def dynamic_figure(family: Family) -> Figure | None:
    """Two points for each equal pair of levels that was run both ways; None without any."""
    ways = {(_text(m, family), m.split, m.dynamic) for m in family.members}
    drawn = [
        m
        for m in family.members
        if len(m.levels) == 2 and m.even and (_text(m, family), m.split, not m.dynamic) in ways
    ]
    by = Series.of("series", (FIXED, REDRAWN), "levels")

    def chart(own: list[Mixture], column: str, title: str) -> Chart:
        ordered = sorted(own, key=lambda m: [family.levels.index(name) for name in m.names])
        rows = [
            score_row(m.group, column, series=(FIXED, REDRAWN)[m.dynamic], pair=_text(m, family))
            for m in ordered
        ]
        table = stacked([pd.DataFrame(rows)], column)
        axis = metric_axis_of(column, table)
        return marks.points(table, axis, Axis("pair", "levels"), by, across=True, title=title)

    caption = "Fixed: a client keeps its level. Redrawn: it draws a new level in every round."
    end = "with fixed and with redrawn levels"
    return _figure("dynamic", family, drawn, chart, end, caption)


@dataclass(frozen=True)
class PairLine:
    """Two levels (wide, narrow) in several shares, by size; the ends may be missing.

    `label` says how the pair differs from the same pair elsewhere.
    """

    names: tuple[str, str]
    label: str
    mixtures: tuple[Mixture, ...]


def pair_lines(family: Family) -> list[PairLine]:
    """The pairs of levels that were mixed in unequal shares, for every partition."""
    pairs = gathered(
        (mixture for mixture in family.members if len(mixture.levels) == 2),
        lambda m: (m.names, (m.split, m.algorithm, m.variant), m.dynamic),
    )
    found = []
    for ((wide, narrow), setting, dynamic), mixed in pairs.items():
        ends = [
            m
            for m in family.members
            if m.names in ((wide,), (narrow,)) and (m.split, m.algorithm, m.variant) == setting
        ]
        every = sorted([*mixed, *ends], key=lambda m: m.size)
        if len({m.size for m in every}) >= LINE_FROM and not all(m.even for m in mixed):
            _, algorithm, variant = setting
            other = algorithm if algorithm != family.algorithm else ""
            parts = (f"{wide}-{narrow}", other, variant, "dynamic" * dynamic)
            label = ", ".join(part for part in parts if part)
            found.append(PairLine((wide, narrow), label, tuple(every)))
    return sorted(found, key=lambda line: [family.levels.index(name) for name in line.names])


def _figure(
    kind: str,
    family: Family,
    drawn: Iterable[Mixture],
    chart: Callable[[list[Mixture], str, str], Chart],
    end: str,
    caption: str,
) -> Figure | None:
    """A chart for each kind of metric and partition that was measured; None without any."""
    charts = []
    for name, split in product(KINDS, family.splits):
        column = f"{name}/{family.metric}"
        own = [m for m in drawn if m.split == split and pd.notna(m.score(column)[0])]
        if own:
            charts.append(chart(own, column, f"{readable(column)}, {split}"))
    title = f"{family.name}: {readable(family.metric)} {end}{family.note}"
    return Figure(file_name(kind, family.name), title, tuple(charts), caption) if charts else None


def _point(mixture: Mixture, column: str, family: Family, line: str) -> dict[str, object]:
    """Of a line, whose ends have names."""
    name = mixture.combination * (len(mixture.levels) == 1)
    size = _size(mixture, family)
    return score_row(mixture.group, column, series=line, size=size, name=name)


def _size(mixture: Mixture, family: Family) -> float:
    return mixture.size / family.largest.parameters


def _size_axis(family: Family, table: pd.DataFrame) -> Axis:
    largest, sizes = family.largest, table["size"]
    log = float(sizes.max()) > LOG_FROM * float(sizes.min())
    low, high = float(sizes.min()), float(sizes.max())
    room = MARGIN * (high - low) or MARGIN * high
    title = f"mean parameters (100 %: {largest.name}, {count_text(largest.parameters)})"
    # names stand to the right of their points
    ends = (low / 1.5, high * 2) if log else (low - room, high + 2 * room)
    return Axis("size", title, format="~%", log=log, ends=ends)


def _text(mixture: Mixture, family: Family) -> str:
    """The combination, and how it differs from the same one elsewhere."""
    other = mixture.algorithm if mixture.algorithm != family.algorithm else ""
    return ", ".join(part for part in (mixture.combination, other, mixture.variant) if part)
