"""The panels of a family's pictures: rows for global and personal, a column per partition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.style import Theme, dress, new_figure
from lightfed.results.run import Floats
from lightfed.results.settings import gathered
from lightfed.results.tables import readable
from lightfed.studies.heterofl.levels import Family, Mixture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("global", "personal")


@dataclass(frozen=True)
class Panel:
    """One pair of axes and its content.

    Attributes:
        axes: with title and labels, otherwise empty.
        column: of metrics.csv.
        mixtures: those of one partition that measured the column.
        family: of these.
    """

    axes: Axes
    column: str
    mixtures: tuple[Mixture, ...]
    family: Family

    def points(self, mixtures: Iterable[Mixture]) -> Floats:
        """(M, 3) relative size, mean and deviation of the metric, by size."""
        full = self.family.largest.parameters
        ordered = sorted(mixtures, key=lambda mixture: mixture.size)
        rows = [(mixture.size / full, *mixture.score(self.column)) for mixture in ordered]
        return np.array(rows, dtype=np.float64).reshape(-1, 3)


def new_panels(
    family: Family, mixtures: Iterable[Mixture], theme: Theme, *, x_label: str, height: float
) -> tuple[Figure, list[Panel]] | None:
    """A figure with all non-empty panels; None if no mixture measured the metric."""
    having = [
        (column, mixture)
        for column in (f"{kind}/{family.metric}" for kind in KINDS)
        for mixture in mixtures
        if math.isfinite(mixture.score(column)[0])
    ]
    cells = gathered(having, lambda pair: (pair[0], pair[1].split))
    columns = list(dict.fromkeys(column for column, _ in cells))
    splits = [split for split in family.splits if any(split == other for _, other in cells)]
    if not cells:
        return None
    width = 8.0 if len(splits) == 1 else 6.4 * len(splits)
    figure = new_figure(width, height * len(columns), theme, pad=0.1)
    grid = figure.subplots(len(columns), len(splits), squeeze=False)
    panels = []
    for axes, (column, split) in zip(grid.ravel(), itertools.product(columns, splits), strict=True):
        if (column, split) in cells:
            title = f"{family.name}: {readable(column)}{family.note}\n{split}"
            label = f"final {readable(family.metric)}"
            dress(axes, theme, title=title, x_label=x_label, y_label=label)
            own = tuple(mixture for _, mixture in cells[column, split])
            panels.append(Panel(axes, column, own, family))
        else:
            axes.remove()
    return figure, panels
