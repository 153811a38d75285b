"""--plot: how many times faster than the official codes, and how near to the copy bandwidth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS
from lightfed_kernels.bench.environment import Environment
from lightfed_kernels.bench.measure import Row

# Colours that stay apart for colour-blind readers, and a shape for every code besides.
_MARKS = {
    OURS: ("#D55E00", "o", 70),
    COMPILED: ("#0072B2", "D", 34),
    "foreach": ("#009E73", "s", 34),
    "flat": ("#999999", "^", 40),
}
_OTHERS = ("#CC79A7", "v", 40)
_OTHER = "another call"
_GREY = "#DDDDDD"


def save(path: Path, environment: Environment, rows: Sequence[Row]) -> None:
    """Two panels for every model; of one dtype, and of masks alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dtype = next((row.dtype for row in rows if row.dtype != "bool"), "bool")
    shown = [row for row in rows if row.dtype in (dtype, "bool")]
    models = list(dict.fromkeys(row.model for row in shown))
    cases = {m: list(dict.fromkeys(_label(r) for r in shown if r.model == m)) for m in models}
    heights = [len(cases[m]) + 2.5 for m in models]
    figure, axes = pyplot.subplots(
        len(models), 2, figsize=(12, 1.2 + 0.3 * sum(heights)), squeeze=False, sharey="row",
        layout="constrained", gridspec_kw={"height_ratios": heights, "width_ratios": [3, 2]},
    )  # fmt: skip
    for model, (left, right) in zip(models, axes, strict=True):
        mine = [row for row in shown if row.model == model]
        _speedups(left, mine, cases[model])
        _rates(right, mine, cases[model])
        left.set_title(f"{model}, {dtype}", loc="left", fontweight="bold")
    figure.legend(*_legend(axes), loc="outside upper right", ncols=6, frameon=False)
    figure.suptitle(
        f"{environment.processor} ({environment.device}), torch {environment.torch}, "
        f"triton {environment.triton}",
        x=0.01, ha="left", fontsize=10,
    )  # fmt: skip
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _label(row: Row) -> str:
    return f"{row.operation}, {row.shape}"


def _speedups(axes: Any, rows: Sequence[Row], cases: Sequence[str]) -> None:
    from matplotlib import ticker

    axes.axvline(1, color="#555555", linewidth=1, zorder=1)
    for contender in dict.fromkeys(row.contender for row in rows if row.contender != OFFICIAL):
        found = [row for row in rows if row.contender == contender]
        colour, mark, size = _MARKS.get(contender, _OTHERS)
        if contender not in _MARKS:
            for row in found:
                place = (row.times_official, cases.index(_label(row)))
                axes.annotate(contender, place, (5, 4), textcoords="offset points", fontsize=7)
        axes.scatter(
            [row.times_official for row in found], [cases.index(_label(row)) for row in found],
            label=contender if contender in _MARKS else _OTHER, s=size, marker=mark, color=colour,
            edgecolors="white", linewidths=0.6, zorder=4 if contender == OURS else 3,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("times as fast as the official code")
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    _tidy(axes)


def _rates(axes: Any, rows: Sequence[Row], cases: Sequence[str]) -> None:
    found = [row for row in rows if row.contender == OURS]
    places = [cases.index(_label(row)) for row in found]
    axes.barh(places, [row.copy_percent for row in found], height=0.55, color=_MARKS[OURS][0])
    for place, row in zip(places, found, strict=True):
        axes.text(row.copy_percent, place, f" {row.copy_percent:.0f}", va="center", fontsize=8)
    axes.axvline(100, color="#555555", linewidth=1)
    axes.set_xlim(0, max(105.0, *(1.1 * row.copy_percent for row in found)))
    axes.set_xlabel("ours: useful bytes, % of the copy bandwidth")
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.grid(color=_GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(every: Any) -> tuple[list[Any], list[str]]:
    """One entry for every code of any panel."""
    found: dict[str, Any] = {}
    for axes in every[:, 0]:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    return list(found.values()), list(found)
