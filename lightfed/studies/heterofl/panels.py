"""The panels of a family's pictures: a row for global, one for personal, a column a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.style import Theme, dress, new_figure
from lightfed.results.groups import synthetic_note
from lightfed.results.tables import readable
from lightfed.studies.heterofl.levels import Family, Mixture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("global", "personal")


@dataclass(frozen=True)
class Panel:
    """One pair of axes and what belongs on it.

    Attributes:
        axes: with title and labels, still empty.
        column: of metrics.csv.
        mixtures: those of one division of the data that measured the column.
    """

    axes: Axes
    column: str
    mixtures: tuple[Mixture, ...]


def new_panels(
    family: Family,
    mixtures: Sequence[Mixture],
    theme: Theme,
    *,
    x_label: str,
    height: float,
) -> tuple[Figure, list[Panel]] | None:
    """A figure with the panels that `mixtures` fill; None where none measured the metric."""
    columns = [f"{kind}/{family.metric}" for kind in KINDS]
    having = {c: [m for m in mixtures if np.isfinite(m.score(c)[0])] for c in columns}
    columns = [column for column in columns if having[column]]
    splits = [s for s in family.splits if any(m.split == s for c in columns for m in having[c])]
    if not columns:
        return None
    width = 8.0 if len(splits) == 1 else 6.4 * len(splits)
    figure = new_figure(width, height * len(columns), theme, pad=0.1)
    grid = figure.subplots(len(columns), len(splits), squeeze=False)
    note = synthetic_note(family.mixtures)
    panels = []
    for i, column in enumerate(columns):
        for j, split in enumerate(splits):
            own = tuple(m for m in having[column] if m.split == split)
            if not own:
                grid[i, j].remove()
                continue
            title = f"{family.name}: {readable(column)}{note}\n{split}"
            label = f"final {readable(family.metric)}"
            dress(grid[i, j], theme, title=title, x_label=x_label, y_label=label)
            panels.append(Panel(grid[i, j], column, own))
    return figure, panels
