"""The style of the pictures: one palette, two themes, matplotlib's object API without pyplot.

The ten colours of groups and runs are close to those of M. A. Petroff, "Accessible Color Sequences
for Data Visualization", 2021, arXiv:2107.02270. Red and purple are lighter, so that one palette
works on light and dark backgrounds. Any two can be distinguished under the three common colour
vision deficiencies.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightfed.results.run import Floats, Integers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

DPI = 150
PALETTE = (
    "#4194de",
    "#ffa907",
    "#c72602",
    "#8643d1",
    "#97a89e",
    "#a96b59",
    "#e9670e",
    "#b9ac70",
    "#6f707f",
    "#92dadd",
)
PANEL_LETTERS = 66
LETTERS_PER_INCH = 13.5
TITLE_LETTERS_PER_INCH = 10
LABEL_LETTERS = 40
LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Theme:
    """Colours of one scheme, for pictures and pages.

    Attributes:
        ramp: from low to high.
        diverging: from brown through grey to blue, which nearly everyone can distinguish.
    """

    face: str
    ink: str
    muted: str
    grid: str
    accent: str
    ramp: tuple[str, ...]
    diverging: tuple[str, ...]


LIGHT = Theme(
    face="#ffffff",
    ink="#1c2530",
    muted="#5d6b7a",
    grid="#e4e8ed",
    accent="#00857a",
    ramp=("#f4f6f8", "#c6dcec", "#7fb2d9", "#3a7fbd", "#1c4f8b", "#0c2b57"),
    diverging=("#8f4a00", "#e0a050", "#e2e5e8", "#6aa3d5", "#134f8c"),
)
DARK = Theme(
    face="#161c24",
    ink="#e6ebf1",
    muted="#9aa8b7",
    grid="#2b3542",
    accent="#2fc4b2",
    ramp=("#1d2530", "#1d3f63", "#25659c", "#3f90cf", "#86bfe6", "#e3f1fb"),
    diverging=("#ffb454", "#9a6420", "#39424e", "#2d6ea8", "#7cc4ff"),
)


def colour_of(place: int) -> str:
    """The colour of a client group or run, by its position among all of them."""
    return PALETTE[place % len(PALETTE)]


def line_of(place: int) -> str:
    """The line style, which distinguishes lines that share a colour."""
    return LINES[place // len(PALETTE) % len(LINES)]


def new_figure(width: float, height: float, theme: Theme, *, pad: float = 0.04) -> Figure:
    """An empty figure of `width` x `height` inches, with `pad` inches around its axes."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=pad, h_pad=pad)
    return Figure(figsize=(width, height), dpi=DPI, layout=layout, facecolor=theme.face)


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.image import imsave

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # once; `savefig` draws a second time, for the layout
    pixels, buffer = canvas.buffer_rgba(), io.BytesIO()
    unsigned: Any = {"Software": None}
    imsave(buffer, pixels, format="png", origin="upper", dpi=DPI, metadata=unsigned)
    return buffer.getvalue()


@dataclass(frozen=True)
class Image:
    """One picture as PNG in both colour schemes."""

    light: bytes
    dark: bytes


def render(draw: Callable[[Theme], Figure | None]) -> Image | None:
    """Draw a figure in both colour schemes; None if there is nothing to draw."""
    light, dark = draw(LIGHT), draw(DARK)
    return Image(png_bytes(light), png_bytes(dark)) if light and dark else None


def dress(axes: Axes, theme: Theme, *, title: str, x_label: str, y_label: str) -> None:
    """A left-aligned title, two spines and a light grid."""
    axes.set_facecolor(theme.face)
    set_title(axes, title, theme)
    axes.set_xlabel(literal(x_label), fontsize=8.5, color=theme.muted)
    axes.set_ylabel(literal(y_label), fontsize=8.5, color=theme.muted)
    axes.tick_params(which="both", labelsize=8, colors=theme.muted, width=0.6)
    axes.tick_params(length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.muted)
    axes.spines[["left", "bottom"]].set_linewidth(0.6)
    axes.grid(color=theme.grid, linewidth=0.7)
    axes.set_axisbelow(True)


def set_title(axes: Axes, title: str, theme: Theme, *, pad: float = 8.0) -> None:
    """A bold left-aligned title, `pad` points above the axes."""
    axes.set_title(
        literal(title), loc="left", fontsize=10, fontweight="bold", color=theme.ink, pad=pad
    )


def title_over_all(figure: Figure, title: str, theme: Theme) -> None:
    """A left-aligned title above all panels of a figure."""
    lines = textwrap.wrap(title, int(TITLE_LETTERS_PER_INCH * figure.get_figwidth()))
    text = literal("\n".join(lines))
    figure.suptitle(text, x=0.01, ha="left", fontsize=10, fontweight="bold", color=theme.ink)


def heat_map(
    axes: Axes,
    values: Floats | Integers,
    colours: Sequence[str],
    *,
    norm: Normalize | None = None,
    aspect: Literal["auto", "equal"] = "auto",
) -> AxesImage:
    """A cell for each of (rows, columns) values, blank for NaN, without grid and spines."""
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("values", colours)
    image = axes.imshow(values, cmap=ramp, norm=norm, aspect=aspect, interpolation="nearest")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return image


def dress_colour_bar(bar: Colorbar, theme: Theme, *, label: str) -> None:
    bar.set_label(label, fontsize=8.5, color=theme.muted)
    bar.ax.tick_params(labelsize=8, colors=theme.muted, length=3, width=0.6)
    bar.outline.set_visible(False)


def legend_below(axes: Axes, theme: Theme) -> None:
    """A legend under the axes, where it never covers a curve."""
    if labels := axes.get_legend_handles_labels()[1]:
        columns = _columns(labels, PANEL_LETTERS, most=5 if len(labels) > 4 else 2)
        _legend(axes, theme, place=(-0.01, -0.17), above=False, columns=columns)


def title_and_legend(axes: Axes, title: str, theme: Theme) -> None:
    """A title, and a legend between it and the axes if any artist has a label."""
    labels = axes.get_legend_handles_labels()[1]
    letters = _letters(axes)
    columns = _columns(labels, letters, most=10) if labels else 1
    if labels:
        _legend(axes, theme, place=(-0.005, 1.0), above=True, columns=columns)
    lines = textwrap.wrap(title, int(0.75 * letters))
    set_title(axes, "\n".join(lines), theme, pad=8.0 + 14.0 * -(-len(labels) // columns))


def legend_of_all(figure: Figure, axes: Axes, theme: Theme) -> None:
    """One legend below all axes of a figure; `axes` has the lines."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=_columns(labels, _letters(axes), most=6),
        fontsize=8.5,
        frameon=False,
        labelcolor=theme.ink,
    )


def _letters(axes: Axes) -> int:
    """How many letters of a legend fit into the width of the figure."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return int(LETTERS_PER_INCH * figure.get_figwidth())


def _columns(labels: Sequence[str], letters: int, *, most: int) -> int:
    """Number of columns into which the longest label fits; a handle is about six letters wide."""
    return max(1, min(most, len(labels), letters // (6 + max(map(len, labels)))))


def _legend(
    axes: Axes, theme: Theme, *, place: tuple[float, float], above: bool, columns: int
) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles,
        labels,
        loc="lower left" if above else "upper left",
        bbox_to_anchor=place,
        ncols=columns,
        fontsize=8,
        frameon=False,
        labelcolor=theme.ink,
        handlelength=1.6,
        columnspacing=1.4,
        borderaxespad=0.2,
    )


def curve(axes: Axes, x: Floats, y: Floats, *, colour: str, label: str, line: str = "-") -> None:
    """A line through the measured points, with markers if there are few."""
    known = np.isfinite(x) & np.isfinite(y)
    axes.plot(
        x[known],
        y[known],
        line,
        color=colour,
        label=label_of(label),
        linewidth=1.8,
        marker="o" if known.sum() <= 15 else None,
        markersize=3,
    )


def share_axis(axis: Axis) -> None:
    """Ticks in per cent for a metric in 0..1."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(xmax=1.0))


def whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def spans_decades(series: Sequence[Floats]) -> bool:
    """Whether all finite values are positive and the largest is over 50 times the smallest."""
    finite = np.concatenate([values[np.isfinite(values)] for values in series])
    return bool(len(finite) and finite.min() > 0 and finite.max() > 50 * finite.min())


def literal(text: str) -> str:
    """Escape dollar signs, which would start a formula."""
    return text.replace("$", r"\$")


def label_of(name: str) -> str:
    """A user's name for a legend or an axis: escaped, and truncated if very long."""
    return literal(name if len(name) <= LABEL_LETTERS else name[: LABEL_LETTERS - 3] + "...")
