"""How many times faster than the papers' codes, and how near to the copy bandwidth: a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.case import COMPILED, OFFICIAL, OURS
from bench.measure import Environment, Row

# Colours that stay apart for colour-blind readers, and a shape for every code besides.
_MARKS = {
    OURS: ("#D55E00", "o"),
    COMPILED: ("#0072B2", "D"),
    "foreach": ("#009E73", "s"),
    "flat": ("#999999", "^"),
}
_OTHERS = ("#CC79A7", "v")


def save(path: Path, environment: Environment, rows: Sequence[Row]) -> None:
    """Two panels for every model; of one dtype, and of masks alone."""
    from matplotlib.figure import Figure

    dtype = next((row.dtype for row in rows if row.dtype != "bool"), "bool")
    shown = [row for row in rows if row.dtype in (dtype, "bool")]
    models = list(dict.fromkeys(row.model for row in shown))
    heights = [2.5 + len({_label(row) for row in shown if row.model == model}) for model in models]
    figure = Figure(figsize=(12, 1.2 + 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(
        len(models), 2, squeeze=False, sharey="row", height_ratios=heights, width_ratios=[3, 2]
    )
    for model, (left, right) in zip(models, panels, strict=True):
        mine = [row for row in shown if row.model == model]
        _speedups(left, mine)
        _rates(right, [row for row in mine if row.contender == OURS])
        left.invert_yaxis()  # shared by both panels
        left.set_title(f"{model}, {dtype}", loc="left", fontweight="bold")
    figure.suptitle(f"{environment.processor}, torch {environment.torch}", fontsize=10)
    figure.savefig(path, dpi=130)


def _label(row: Row) -> str:
    return f"{row.operation}, {row.shape}"


def _speedups(axes: Any, rows: Sequence[Row]) -> None:
    for contender in dict.fromkeys(row.contender for row in rows if row.contender != OFFICIAL):
        found = [row for row in rows if row.contender == contender]
        colour, mark = _MARKS.get(contender, _OTHERS)
        axes.plot(
            [row.times_official for row in found], [_label(row) for row in found],
            label=contender, linestyle="", marker=mark, color=colour,
        )  # fmt: skip
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("times as fast as the official code")
    axes.legend(fontsize=8)
    axes.grid(color="#DDDDDD")


def _rates(axes: Any, rows: Sequence[Row]) -> None:
    bars = axes.barh(
        [_label(row) for row in rows], [row.copy_percent for row in rows], color=_MARKS[OURS][0]
    )
    axes.bar_label(bars, fmt=" %.0f", fontsize=8)
    axes.axvline(100, color="#555555", linewidth=1)
    axes.set_xlabel("ours: useful bytes, % of the copy bandwidth")
