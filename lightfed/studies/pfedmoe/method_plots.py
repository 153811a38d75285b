"""Pictures of methods in one protocol: differences by client, costs to a target, robustness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.axes import metric_axis
from lightfed.drawing.style import (
    Theme,
    colour_of,
    dress,
    label_of,
    legend_of_all,
    literal,
    new_figure,
    title_over_all,
)
from lightfed.results.intervals import goal_text, resolution_text
from lightfed.results.settings import variants
from lightfed.results.tables import readable
from lightfed.results.units import bytes_text, flops_text, is_share, unit_of
from lightfed.studies.pfedmoe.methods import OURS, PLACES, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Terms = tuple[str, str, frozenset[tuple[str, str]]]  # data, factor, all other options
BETTER, WORSE = colour_of(0), colour_of(2)
MOST_TICKS = 25
FACTORS = {
    "partition per_client": "classes of a client",
    "partition alpha": "gamma, the concentration of classes",
}


def differences_figure(protocol: Protocol, theme: Theme) -> Figure | None:
    """A bar per client, the mean over the seeds; a point per seed. None without both methods."""
    found = protocol.differences()
    baseline = protocol.best_other(protocol.ours)
    if not found or baseline is None:
        return None
    scale = 100.0 if is_share(protocol.metric) else 1.0
    places = np.arange(len(found))
    means = np.array([scale * values.mean() for values in found.values()])
    figure = new_figure(max(8.0, min(14.0, 0.3 * len(found))), 4.4, theme, pad=0.1)
    axes = figure.subplots()
    unit = "percentage points" if is_share(protocol.metric) else readable(protocol.metric)
    title = f"{protocol.name}: {OURS} against {baseline.name}, the best baseline{protocol.note}"
    dress(axes, theme, title=title, x_label="client", y_label=f"difference in {unit}")
    axes.bar(places, means, color=[BETTER if mean >= 0 else WORSE for mean in means])
    if max(map(len, found.values())) > 1:
        x = np.repeat(places, [len(values) for values in found.values()])
        y = scale * np.concatenate([*found.values()])
        axes.scatter(x, y, s=9, color=theme.ink, zorder=3, label="one seed")
        legend_of_all(figure, axes, theme)
    axes.axhline(0.0, color=theme.muted, linewidth=0.8)
    shown = places[:: 1 + len(found) // MOST_TICKS]
    axes.set_xticks(shown, [str([*found][place]) for place in shown])
    axes.grid(axis="x", visible=False)
    return figure


def costs_figure(protocol: Protocol, asked: float | None, theme: Theme) -> Figure | None:
    """Bytes and FLOPs to the target, a bar per method; None if no method reached it."""
    target = protocol.target(asked)
    costs = {m.label: m.cost(protocol.metric, target) for m in protocol.members}
    if all(math.isnan(cost.rounds) for cost in costs.values()):
        return None
    figure = new_figure(11.0, 1.6 + 0.36 * len(costs), theme, pad=0.1)
    grid = figure.subplots(1, 2, sharey=True)
    colours = [colour_of(PLACES[method.name]) for method in protocol.members]
    goal = goal_text(protocol.column, target)
    resolution = resolution_text(protocol.runs, protocol.column)
    title = f"{protocol.name}: costs to {goal}, resolution {resolution}{protocol.note}"
    panels = (
        ("bytes up and down", "B", bytes_text, [cost.bytes for cost in costs.values()]),
        ("operations", "FLOPs", flops_text, [cost.flops for cost in costs.values()]),
    )
    for axes, (label, unit, text, values) in zip(grid, panels, strict=True):
        most = float(np.nanmax(values))
        factor, scaled = unit_of(most, unit)
        dress(axes, theme, title="", x_label=f"{label} of all clients ({scaled})", y_label="")
        axes.barh(range(len(values)), np.nan_to_num(values) / factor, color=colours)
        for place, value in enumerate(values):
            end_text = "not reached" if math.isnan(value) else text(value)
            end = float(np.nan_to_num(value)) / factor
            style = {"textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(end_text, (end, place), (4, 0), color=theme.ink, **style)
        axes.set_xlim(0, 1.25 * max(1.0, most) / factor)
        axes.grid(axis="y", visible=False)
    grid[0].set_yticks(range(len(costs)), [literal(name) for name in costs])
    grid[0].invert_yaxis()
    title_over_all(figure, title, theme)
    return figure


@dataclass(frozen=True)
class Robustness:
    """Protocols that differ in only one option.

    Attributes:
        data: its name in the runs.
        variant: other options in which they differ from most protocols with that data.
        factor: the option.
        protocols: by its value, ascending.
    """

    data: str
    variant: str
    factor: str
    protocols: dict[float, Protocol]

    @property
    def metric(self) -> str:
        return next(iter(self.protocols.values())).metric

    @property
    def name(self) -> str:
        data = f"{self.data}; {self.variant}" if self.variant else self.data
        return f"{data}: {readable(self.metric)} by {FACTORS[self.factor]}"


def robustness(protocols: Sequence[Protocol]) -> list[Robustness]:
    """The studies over classes per client and over gamma."""
    members: dict[Terms, tuple[dict[str, str], dict[float, Protocol]]] = {}
    for protocol in protocols:
        options = protocol.members[0].options
        for factor in FACTORS:
            if (value := _number(options.get(factor))) is not None:
                rest = {name: text for name, text in options.items() if name != factor}
                terms = (protocol.data, factor, frozenset(rest.items()))
                members.setdefault(terms, (rest, {}))[1][value] = protocol
    found = {terms: own for terms, own in members.items() if len(own[1]) > 1}
    names = variants([rest for rest, _ in found.values()], [data for data, *_ in found])
    return [
        Robustness(data, variant, factor, dict(sorted(own.items())))
        for ((data, factor, _), (_, own)), variant in zip(found.items(), names, strict=True)
    ]


def robustness_figure(found: Robustness, theme: Theme) -> Figure | None:
    """A line per method over the values of the option; None unless a method has two."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for value, protocol in found.protocols.items():
        for method in protocol.members:
            mean, std = method.score(found.metric)
            if math.isfinite(mean):
                lines.setdefault(method.name, []).append((value, mean, std))
    if max(map(len, lines.values()), default=0) < 2:
        return None
    figure = new_figure(8.0, 5.0, theme, pad=0.1)
    axes = figure.subplots()
    note = next(iter(found.protocols.values())).note
    label = f"final personal {readable(found.metric)}, mean over clients"
    dress(axes, theme, title=found.name + note, x_label=FACTORS[found.factor], y_label=label)
    for name, points in sorted(lines.items(), key=lambda item: PLACES[item[0]]):
        x, mean, std = np.array(points).T
        axes.errorbar(
            x, mean, yerr=np.nan_to_num(std), marker="o", markersize=4, label=label_of(name),
            color=colour_of(PLACES[name]), linewidth=2.2 if name == OURS else 1.2,
        )  # fmt: skip
    axes.set_xticks([*found.protocols], [f"{value:g}" for value in found.protocols])
    metric_axis(axes, found.metric, np.array([p[1] for points in lines.values() for p in points]))
    legend_of_all(figure, axes, theme)
    return figure


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
