"""Do clients with similar data learn similar masks? Two heat maps and their correlation.

After figure 5 of Dai et al., "DisPFL: Towards Communication-Efficient Personalized Federated
Learning via Decentralized Sparse Training", ICML 2022, arXiv:2206.00187: on the left the cosine
similarity of the label distributions that two clients train on, on the right the Hamming distance
of their masks, here as a share of the elements that at least one client leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.style import (
    Theme,
    dress,
    dress_colour_bar,
    heat_map,
    label_of,
    new_figure,
    share_axis,
)
from lightfed.results.csvfile import damaged
from lightfed.results.run import Floats, Integers, Run
from lightfed.results.tables import Figure as KeyFigure
from lightfed.results.units import NOTHING
from lightfed.studies.dispfl.masks import mask_pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST = 3  # clients: two have a single pair, which cannot be correlated
CLIENTS_NAMED = 24
CLASSES_NAMED = 30
SMALLEST_STD = 1e-9  # values that vary only by rounding have no correlation


@dataclass(frozen=True)
class Similarity:
    """K clients sorted by their most frequent class, then by its share, largest first.

    Attributes:
        client: (K,) ids.
        dominant: (K,) the most frequent class of each, ascending.
        labels: (K, K) cosine similarity of the class shares.
        masks: (K, K) Hamming distance as a share of the elements that a client leaves out.
        total: clients of the run that have a mask.
    """

    client: Integers
    dominant: Integers
    labels: Floats
    masks: Floats
    total: int

    @property
    def pairs(self) -> int:
        return math.comb(len(self.client), 2)

    @property
    def correlation(self) -> float:
        """Pearson's correlation over the pairs; NaN if all labels or all masks are the same."""
        upper = np.triu_indices(len(self.client), k=1)
        labels, masks = self.labels[upper], self.masks[upper]
        if min(labels.std(), masks.std()) < SMALLEST_STD:
            return math.nan
        return float(np.corrcoef(labels, masks)[0, 1])


@lru_cache(maxsize=1)  # called for two themes and the page; large masks take seconds
def similarity_of(run: Run) -> Similarity | None:
    """The similarities; None without a partition, three clients with masks, or a sparse mask.

    Raises:
        UserError: a mask is damaged or of a client that the partition does not know.
    """
    found = mask_pairs(run) if run.partition else None
    if run.partition is None or found is None or len(found.client) < FEWEST or not found.sparse:
        return None
    if found.client[-1] >= len(run.partition.counts):
        text = f"it knows no client {found.client[-1]}, who has a mask"
        raise damaged(run.folder / "partition.npz", text)
    counts = run.partition.counts.to_numpy()[found.client]
    dominant = counts.argmax(axis=1)
    share = counts.max(axis=1) / np.maximum(1, counts.sum(axis=1))
    order = np.lexsort((-share, dominant))
    return Similarity(
        client=found.client[order],
        dominant=dominant[order],
        labels=_cosines(counts[order]),
        masks=found.distance[np.ix_(order, order)],
        total=found.total,
    )


def similarity_figure(run: Run, theme: Theme) -> Figure | None:
    """The two heat maps next to each other; None for a run without these data."""
    found = similarity_of(run)
    if found is None:
        return None
    figure = new_figure(11.0, 5.6, theme, pad=0.1)
    left, right = figure.subplots(1, 2)
    titles = (f"Training labels of two clients{run.note}", f"Masks of two clients{run.note}")
    _draw(left, found.labels, theme, title=titles[0], near_low=False)
    _draw(right, found.masks, theme, title=titles[1], near_low=True)
    for axes in (left, right):
        _name_clients(axes, found, run)
    text = f"Pearson correlation of the two over {_pairs_text(found)}: {_correlation_text(found)}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=10, color=theme.ink)
    return figure


def similarity_figures(run: Run) -> list[KeyFigure]:
    """The correlation for the key figures of a run; empty if there is none."""
    found = similarity_of(run)
    if found is None or math.isnan(found.correlation):
        return []
    note = f"Pearson correlation, {_pairs_text(found)}"
    return [KeyFigure("label similarity, mask distance", _correlation_text(found), note)]


def _cosines(counts: Integers) -> Floats:
    norms = np.linalg.norm(counts, axis=1, keepdims=True)
    rows = counts / np.maximum(1.0, norms)  # counts that are not all zero have a norm of at least 1
    return rows @ rows.T


def _draw(axes: Axes, values: Floats, theme: Theme, *, title: str, near_low: bool) -> None:
    """A square of (K, K) values, dark for close clients, blank on the diagonal."""
    dress(axes, theme, title=title, x_label="", y_label="")
    colours = theme.ramp[::-1] if near_low else theme.ramp
    pairs = np.where(np.eye(len(values), dtype=bool), np.nan, values)
    image = heat_map(axes, pairs, colours, aspect="equal")
    figure = axes.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.046)
    if near_low:
        dress_colour_bar(bar, theme, label="Hamming distance, of elements not in every mask")
        share_axis(bar.ax.yaxis)
        bar.ax.invert_yaxis()
    else:
        dress_colour_bar(bar, theme, label="cosine similarity of the classes' shares")


def _name_clients(axes: Axes, found: Similarity, run: Run) -> None:
    """Label the axes: ids of few clients, or the classes of many, unless these are many as well.

    White lines separate labelled classes.
    """
    assert run.partition is not None
    starts = np.flatnonzero(np.diff(found.dominant, prepend=-1))
    places: Floats = np.empty(0)
    names: list[str] = []
    if len(found.client) <= CLIENTS_NAMED:
        places = np.arange(len(found.client), dtype=np.float64)
        names = [f"{client}" for client in found.client]
    elif len(starts) <= CLASSES_NAMED:
        ends = np.append(starts[1:], len(found.client))
        places = (starts + ends - 1) / 2
        names = [label_of(run.partition.counts.columns[found.dominant[start]]) for start in starts]
        face = axes.get_facecolor()
        for start in starts[1:]:
            axes.axhline(start - 0.5, color=face, linewidth=0.8)
            axes.axvline(start - 0.5, color=face, linewidth=0.8)
    axes.set_xticks(places, names, rotation=90 if max(map(len, names), default=0) > 3 else 0)
    axes.set_yticks(places, names)
    axes.set_xlabel("clients, by most frequent class")


def _pairs_text(found: Similarity) -> str:
    """The number of pairs, and which clients they cover if not all."""
    shown = len(found.client)
    of = f" of {shown:,} of {found.total:,} clients" if shown < found.total else " of clients"
    return f"{found.pairs:,} pairs{of}"


def _correlation_text(found: Similarity) -> str:
    value = found.correlation
    return NOTHING if math.isnan(value) else f"{value:+.3f}"
