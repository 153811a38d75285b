"""Texts next to the points of a chart, placed so that they cover neither points nor each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.style import Theme, label_of
from lightfed.results.run import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT_SIZE = 7.0
LETTER = (0.58, 1.2)  # width and height of a letter, in font sizes
MARK, THIN = (
    4.0,
    0.8,
)  # half the size of a point or a piece of a line, in 1/72 inch
PIECES = 40
DISTANCES = (7.0, 15.0, 25.0, 37.0)
LEADER_FROM = 12.0
ANGLES = np.arange(16) * np.pi / 8


def place_labels(
    figure: Figure,
    axes: Axes,
    labels: Iterable[tuple[float, float, str]],
    theme: Theme,
    *,
    marks: Floats,
    lines: Sequence[Floats],
) -> None:
    """Write each label at the free place nearest to its point, with a line if that is far.

    Call it after everything else is drawn and the layout is final.

    Args:
        figure: of the axes.
        axes: to draw on.
        labels: (x, y, text) in data coordinates, placed from top to bottom.
        theme: for the colours.
        marks: (M, 2) points that must stay visible, in data coordinates.
        lines: (L, 2) corners of each line that should stay visible.
    """
    points = 72.0 / figure.dpi
    frame = axes.get_window_extent()
    low, high = np.array([frame.p0, frame.p1]) * points
    centres = axes.transData.transform(marks) * points
    along = [_along(axes.transData.transform(line) * points) for line in lines if len(line)]
    # boxes (M + N, 4): left, low, right, high
    taken = np.concatenate([_around(centres, MARK), *(_around(line, THIN) for line in along)])
    for x, y, full in sorted(labels, key=lambda label: (-label[1], label[0])):
        at = axes.transData.transform((x, y)) * points
        text = label_of(full)
        half = 0.5 * FONT_SIZE * np.array(LETTER) * (len(text), 1)
        offset, box = _nearest_free(at, half, taken, low=low, high=high)
        taken = np.concatenate([taken, box[None]])
        far = bool(np.hypot(*offset) > LEADER_FROM + half[0])
        note = axes.annotate(
            text,
            (x, y),
            xytext=(float(offset[0]), float(offset[1])),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=FONT_SIZE,
            color=theme.ink,
            arrowprops={"arrowstyle": "-", "color": theme.muted, "linewidth": 0.5} if far else None,
            zorder=5,
        )
        note.set_in_layout(False)


def _around(centres: Floats, half: float) -> Floats:
    return np.concatenate([centres - half, centres + half], axis=1)


def _along(corners: Floats) -> Floats:
    """(PIECES * (L - 1), 2) points on the straight lines between successive corners."""
    steps = np.linspace(0.0, 1.0, PIECES)[:, None, None]
    return (corners[:-1] + steps * (corners[1:] - corners[:-1])).reshape(-1, 2)


def _nearest_free(
    at: Floats, half: Floats, taken: Floats, *, low: Floats, high: Floats
) -> tuple[Floats, Floats]:
    """Offset (2,) of the text's centre from its point, and the box (4,) of the text there.

    Chooses the place that covers least, and among equals the nearest.
    """
    directions = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)  # (A, 2)
    # the text touches a circle around the point with its nearest side
    offsets = np.concatenate([directions * (distance + half) for distance in DISTANCES])
    boxes = np.concatenate([at + offsets - half, at + offsets + half], axis=1)  # (A D, 4)
    shared = np.minimum(boxes[:, None, 2:], taken[:, 2:]) - np.maximum(
        boxes[:, None, :2], taken[:, :2]
    )
    covered = np.prod(shared.clip(min=0.0), axis=2).sum(axis=1)
    outside = (low - boxes[:, :2]).clip(min=0.0) + (boxes[:, 2:] - high).clip(min=0.0)
    far = np.repeat(DISTANCES, len(ANGLES))
    best = int(np.lexsort((far, covered + 100.0 * outside.sum(axis=1)))[0])
    return offsets[best], boxes[best]
