"""Picture of the partition: training samples per class and client, and in total per client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.style import (
    Theme,
    colour_of,
    dress,
    dress_colour_bar,
    heat_map,
    label_of,
    new_figure,
    title_and_legend,
)
from lightfed.results.run import Integers, Partition, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

CLIENTS_SHOWN = 200
CLASSES_SHOWN = 100
CLASSES_NAMED = 40
CLIENTS_WITH_NUMBERS = 24
CLASSES_WITH_NUMBERS = 20


def partition_figure(run: Run, theme: Theme) -> Figure | None:
    """Classes x clients, below bars of samples per client; None without a partition."""
    split = run.partition
    if split is None or not split.counts.to_numpy().any():
        return None
    shown = evenly_spaced(len(split.counts), most=CLIENTS_SHOWN)
    counts, names = _rows(split, shown)
    heat_height = float(np.clip(0.26 * len(names), 1.2, 5.5))
    width = float(np.clip(4.0 + 0.42 * len(shown), 6.5, 11.0))
    figure = new_figure(width, heat_height + 2.3, theme)
    bars, heat = figure.subplots(2, 1, sharex=True, height_ratios=(0.9, heat_height))
    dress(bars, theme, title="", x_label="", y_label="samples")
    _draw_bars(bars, run, shown, theme=theme)
    title_and_legend(bars, partition_title(run, split, shown=len(shown)), theme)
    dress(heat, theme, title="", x_label="client", y_label="class")
    image = _draw_heat(heat, counts, theme)
    heat.set_yticks(*class_ticks(names))
    _name_clients(heat, shown)
    bar = figure.colorbar(
        image, ax=[bars, heat], pad=0.012, fraction=0.03, aspect=(heat_height + 1.5) / 0.13
    )
    dress_colour_bar(bar, theme, label="training samples of one class")
    return figure


def partition_title(run: Run, split: Partition, *, shown: int) -> str:
    """Title with the data set, the partition scheme, and what was left out."""
    origin = [str(split.meta[key]) for key in ("dataset", "scheme") if split.meta.get(key)]
    title = "Who holds what" + (f": {', '.join(origin)}" if origin else "")
    title += run.note
    if shown < len(split.counts):
        title += f"; {shown:,} of {len(split.counts):,} clients, evenly spaced by id"
    if split.counts.shape[1] > CLASSES_SHOWN:
        title += f"; {split.counts.shape[1]:,} classes, summed in {CLASSES_SHOWN} groups"
    return title


def evenly_spaced(total: int, *, most: int) -> Integers:
    """At most `most` of 0..total-1, ascending, including the first and the last."""
    return np.unique(np.linspace(0, total - 1, min(total, most)).round().astype(np.int64))


def class_groups(classes: int) -> Integers:
    """First class of every row: one class per row, or 100 groups of neighbouring classes."""
    return np.linspace(0, classes, min(classes, CLASSES_SHOWN), endpoint=False).astype(np.int64)


def class_ticks(names: list[str]) -> tuple[list[int], list[str]]:
    """Positions and names of the ticks on a class axis, at most 40."""
    every = -(-len(names) // CLASSES_NAMED)
    return [*range(0, len(names), every)], [label_of(name) for name in names[::every]]


def _rows(split: Partition, shown: Integers) -> tuple[Integers, list[str]]:
    """Counts (rows, shown clients) and names of the rows: classes, or groups of many classes."""
    counts = split.counts.to_numpy()[shown].T
    starts = class_groups(len(counts))
    return np.add.reduceat(counts, starts, axis=0), [split.counts.columns[i] for i in starts]


def _draw_bars(axes: Axes, run: Run, shown: Integers, *, theme: Theme) -> None:
    """Samples per client, coloured by client group if there are several."""
    assert run.partition is not None
    samples = run.partition.counts.to_numpy()[shown].sum(axis=1)
    axes.tick_params(bottom=False, labelbottom=False)
    axes.grid(axis="x", visible=False)
    axes.locator_params(axis="y", nbins=3)
    width = 0.84 if len(shown) <= 60 else 1.0
    client_group = run.evaluation["cohort"].reindex(shown, fill_value="").to_numpy()
    known = [name for name in run.client_groups if (client_group == name).any()]
    if len(known) < 2:
        axes.bar(np.arange(len(shown)), samples, width=width, color=theme.accent)
        return
    for name in known:
        member = np.flatnonzero(client_group == name)
        colour = colour_of(run.client_groups.index(name))
        axes.bar(
            member,
            samples[member],
            width=width,
            color=colour,
            label=label_of(f"client group {name}"),
        )
    unknown = np.flatnonzero(client_group == "")
    axes.bar(unknown, samples[unknown], width=width, color=theme.muted)


def _draw_heat(axes: Axes, counts: Integers, theme: Theme) -> AxesImage:
    from matplotlib.colors import PowerNorm

    # the square root keeps a class of five samples visible next to one of five hundred
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, int(counts.max())))
    image = heat_map(axes, counts, theme.ramp, norm=norm)
    num_classes, num_clients = counts.shape
    if num_clients <= CLIENTS_WITH_NUMBERS and num_classes <= CLASSES_WITH_NUMBERS:
        for row, column in np.argwhere(counts):
            dark = norm(counts[row, column]) > 0.5
            colour = theme.ramp[0] if dark else theme.ink
            text = f"{counts[row, column]}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    return image


def _name_clients(axes: Axes, shown: Integers) -> None:
    """Label round client ids, at the position of the next client shown."""
    from matplotlib.ticker import MaxNLocator

    ids = np.arange(len(shown))
    if len(shown) > CLIENTS_WITH_NUMBERS:
        ticks = MaxNLocator(10, integer=True).tick_values(0, int(shown[-1]))
        ids = np.array(ticks, dtype=np.int64)
        ids = ids[(ids >= 0) & (ids <= shown[-1])]
    axes.set_xticks(np.searchsorted(shown, ids), [f"{client:,}" for client in ids])
    axes.set_xlim(-0.5, len(shown) - 0.5)
