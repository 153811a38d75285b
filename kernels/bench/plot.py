"""Draws how many times faster codes are than the papers', and how near to the copy bandwidth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.case import COMPILED, OFFICIAL, OURS
from bench.measure import Environment, Row

# Colors that color-blind readers can tell apart, and besides a shape for every code.
_MARKS = {
    OURS: ("#D55E00", "o"),
    COMPILED: ("#0072B2", "D"),
    "foreach": ("#009E73", "s"),
    "flat": ("#999999", "^"),
}
_OTHERS = ("#CC79A7", "v")


def save(path: Path, environment: Environment, rows: Sequence[Row]) -> None:
    """Save a picture with two panels for every model, for the first dtype and for masks alone."""
    from matplotlib.figure import Figure

    dtype = next((row.dtype for row in rows if row.dtype != "bool"), "bool")
    rows_of_model: dict[str, list[Row]] = {}
    for row in rows:
        if row.dtype in (dtype, "bool"):
            rows_of_model.setdefault(row.model, []).append(row)

    heights = []
    for rows_of_panels in rows_of_model.values():
        lines = {_label(row) for row in rows_of_panels}
        heights.append(2.5 + len(lines))
    figure = Figure(figsize=(12, 1.2 + 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(
        len(rows_of_model),
        2,
        squeeze=False,
        sharey="row",
        height_ratios=heights,
        width_ratios=[3, 2],
    )
    for (model, rows_of_panels), (left, right) in zip(rows_of_model.items(), panels, strict=True):
        _draw_speedups(left, rows_of_panels)
        _draw_rates(right, [row for row in rows_of_panels if row.contender == OURS])
        left.invert_yaxis()  # shared by both panels
        left.set_title(f"{model}, {dtype}", loc="left", fontweight="bold")
    figure.suptitle(f"{environment.processor}, torch {environment.torch}", fontsize=10)
    figure.savefig(path, dpi=130)


def _label(row: Row) -> str:
    """Return the line of a panel on which a row is drawn."""
    return f"{row.operation}, {row.shape}"


def _draw_speedups(axes: Any, rows: Sequence[Row]) -> None:
    """Draw a mark for every row: the time of the official code over its own."""
    rows_of_contender: dict[str, list[Row]] = {}
    for row in rows:
        if row.contender != OFFICIAL:
            rows_of_contender.setdefault(row.contender, []).append(row)

    for contender, rows_with_mark in rows_of_contender.items():
        color, mark = _MARKS.get(contender, _OTHERS)
        axes.plot(
            [row.times_official for row in rows_with_mark],
            [_label(row) for row in rows_with_mark],
            label=contender,
            linestyle="",
            marker=mark,
            color=color,
        )
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("times as fast as the official code")
    axes.legend(fontsize=8)
    axes.grid(color="#DDDDDD")


def _draw_rates(axes: Any, rows: Sequence[Row]) -> None:
    """Draw a bar for every row: its useful rate in percent of the copy bandwidth."""
    bars = axes.barh(
        [_label(row) for row in rows], [row.copy_percent for row in rows], color=_MARKS[OURS][0]
    )
    axes.bar_label(bars, fmt=" %.0f", fontsize=8)
    axes.axvline(100, color="#555555", linewidth=1)
    axes.set_xlabel("ours: useful bytes, % of the copy bandwidth")
