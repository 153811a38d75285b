"""Picture of the gates of a pFedMoE run: how much each client relies on its private expert.

In Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous
Personalized Federated Learning", 2024, arXiv:2402.01350, a gate weighs two experts for every
sample: a shared one for general features and the client's own. The weights add up to 1. The run
records their means over the test samples of each client and class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.heatmap import class_groups, class_ticks
from lightfed.drawing.style import (
    PALETTE,
    Theme,
    colour_of,
    dress,
    dress_colour_bar,
    heat_map,
    label_of,
    legend_of_all,
    new_figure,
)
from lightfed.results.run import Floats, Gates, Integers, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST_ROWS = 50
ROWS_WITH_NUMBERS, CLASSES_WITH_NUMBERS = 24, 20
STRONG = 0.33  # distance from 1/2 above which a cell needs the other text colour


@dataclass(frozen=True)
class GateRows:
    """The rows of the picture: a client each, or a group of clients if there are many.

    Attributes:
        weights: (rows, classes) mean of the private expert; NaN if no client has the class.
        means: (rows,) over the classes of each client, then over the clients of the row.
        client_groups: of each row; empty if unknown.
        names: of the rows.
        clients: number of evaluated clients.
        grouped: whether rows are groups.
    """

    weights: Floats
    means: Floats
    client_groups: tuple[str, ...]
    names: tuple[str, ...]
    clients: int
    grouped: bool


def gate_rows(run: Run, gates: Gates) -> GateRows:
    """A row per client in the order of the ids, up to 50 of them.

    More clients are combined within their client group by similar mean weight, the most personal
    first. All rows combine about the same number of clients.
    """
    client = np.flatnonzero(np.isfinite(gates.personal).any(axis=1))
    values = gates.personal[client]
    means = _mean_of_known(values, np.zeros(1, np.int64), axis=1)[:, 0]
    client_group = _client_groups(run, client)
    if len(client) <= MOST_ROWS:
        names = tuple(str(number) for number in client)
        return GateRows(values, means, tuple(client_group), names, len(client), grouped=False)
    groups = [
        group
        for name in dict.fromkeys(client_group)
        for group in _groups(means, client_group == name)
    ]
    order = np.concatenate(groups)
    starts = np.cumsum([0, *map(len, groups[:-1])])
    kinds = tuple(str(client_group[group[0]]) for group in groups)
    return GateRows(
        weights=_mean_of_known(values[order], starts, axis=0),
        means=_mean_of_known(means[order], starts, axis=0),
        client_groups=kinds,
        names=tuple(
            f"{kind} \u00d7 {len(g)}".lstrip() for kind, g in zip(kinds, groups, strict=True)
        ),
        clients=len(client),
        grouped=True,
    )


def gates_figure(run: Run, theme: Theme) -> Figure | None:
    """Rows x classes next to the mean of each row; None for a run without gates."""
    if run.gates is None or not np.isfinite(run.gates.personal).any():
        return None
    rows = gate_rows(run, run.gates)
    starts = class_groups(rows.weights.shape[1])
    weights = _mean_of_known(rows.weights, starts, axis=1)
    names = [_class_names(run, run.gates)[start] for start in starts]
    height = float(np.clip(0.26 * len(weights), 1.6, 8.0)) + 1.5
    width = float(np.clip(4.4 + 0.42 * len(names), 7.0, 11.0))
    figure = new_figure(width, height, theme)
    heat, side = figure.subplots(1, 2, sharey=True, width_ratios=(width - 3.6, 1.5))
    label = f"groups of similar clients, {rows.clients:,} in all" * rows.grouped or "client"
    title = _title(run, run.gates, len(names))
    dress(heat, theme, title=title, x_label="class", y_label=label)
    image = _draw_heat(heat, weights, theme)
    heat.set_yticks(range(len(weights)), [label_of(name) for name in rows.names])
    places, texts = class_ticks(names)
    heat.set_xticks(places, texts, rotation=90 if max(map(len, texts)) > 3 else 0)
    dress(side, theme, title="", x_label="mean over its classes", y_label="")
    _draw_means(side, rows, run, theme)
    bar = figure.colorbar(image, ax=[heat, side], pad=0.015, fraction=0.03, aspect=30)
    dress_colour_bar(bar, theme, label="0: all shared     weight     1: all private")
    if side.get_legend_handles_labels()[1]:
        legend_of_all(figure, side, theme)
    return figure


def _client_groups(run: Run, client: Integers) -> np.ndarray:
    """The client group of each client; empty if unknown, or if there are more than colours."""
    found = run.evaluation["cohort"].reindex(client, fill_value="").to_numpy(dtype=np.str_)
    return found if len(set(found)) <= len(PALETTE) else np.full(len(client), "")


def _groups(means: Floats, member: np.ndarray) -> list[Integers]:
    """The members in groups of similar mean, the highest first."""
    ordered = np.flatnonzero(member)[np.argsort(-means[member], kind="stable")]
    return np.array_split(ordered, max(1, MOST_ROWS * len(ordered) // len(means)))


def _mean_of_known(values: Floats, starts: Integers, *, axis: int) -> Floats:
    """Means of the runs of values that begin at `starts`, ignoring NaN; NaN if all are."""
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=axis)
    counts = np.add.reduceat(known, starts, axis=axis, dtype=np.int64)
    return np.where(counts > 0, sums / np.maximum(1, counts), np.nan)


def _class_names(run: Run, gates: Gates) -> tuple[str, ...]:
    known = tuple(run.partition.counts.columns) if run.partition else ()
    number = gates.personal.shape[1]
    return known if len(known) == number else tuple(str(i) for i in range(number))


def _title(run: Run, gates: Gates, columns: int) -> str:
    title = f"Mean weight of the private expert after round {gates.round}{run.note}"
    classes = gates.personal.shape[1]
    return title + (f"; {classes:,} classes in {columns} groups" if columns < classes else "")


def _draw_heat(axes: Axes, weights: Floats, theme: Theme) -> AxesImage:
    from matplotlib.colors import Normalize

    # without a weight the hatched background shows
    axes.patch.set(hatch="/////", edgecolor=theme.grid)
    image = heat_map(axes, weights, theme.diverging, norm=Normalize(0.0, 1.0))
    rows, classes = weights.shape
    if rows <= ROWS_WITH_NUMBERS and classes <= CLASSES_WITH_NUMBERS:
        for row, column in np.argwhere(np.isfinite(weights)):
            value = weights[row, column]
            colour = theme.face if abs(value - 0.5) > STRONG else theme.ink
            text = f"{value:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    return image


def _draw_means(axes: Axes, rows: GateRows, run: Run, theme: Theme) -> None:
    """A bar from 1/2 to the mean of each row, in the colour of its group if there are several."""
    axes.tick_params(left=False, labelleft=False)
    axes.grid(axis="y", visible=False)
    several = len(set(rows.client_groups)) > 1
    for name in dict.fromkeys(rows.client_groups):
        own = np.array([client_group == name for client_group in rows.client_groups])
        colour = colour_of(run.client_groups.index(name)) if several and name else theme.accent
        label = label_of(f"client group {name}") if several and name else None
        axes.barh(
            np.flatnonzero(own), rows.means[own] - 0.5, left=0.5, height=0.7, color=colour,
            label=label,
        )  # fmt: skip
    axes.axvline(0.5, color=theme.muted, linewidth=0.8)
    axes.set_xlim(0.0, 1.0)
    axes.set_xticks((0.0, 0.5, 1.0), ("0", "0.5", "1"))
