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

import numpy as np
import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Chart, Figure
from lightfed.results.csvfile import damaged
from lightfed.results.run import Floats, Integers, Run
from lightfed.results.tables import Figure as KeyFigure
from lightfed.results.units import NOTHING
from lightfed.studies.dispfl.masks import mask_pairs

FEWEST = 3  # clients: two have a single pair, which cannot be correlated
MOST_DRAWN = 40
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


@lru_cache(maxsize=1)  # asked for the picture and for the key figure; large masks take seconds
def similarity_of(run: Run) -> Similarity | None:
    """The similarities; None without a partition, three clients with masks, or a sparse mask.

    A UserError if a mask is damaged or of a client that the partition does not know.
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


def similarity_figure(run: Run) -> Figure | None:
    """The two heat maps next to each other; None for a run without these data."""
    found = similarity_of(run)
    if found is None:
        return None
    labels = Axis("value", "cosine similarity", ends=(0.0, 1.0), format=".2f")
    masks = Axis("value", "Hamming distance", format=".1%")
    charts = (
        _chart(found, found.labels, labels, "Training labels of two clients"),
        _chart(found, found.masks, masks, "Masks of two clients"),
    )
    drawn = f" {MOST_DRAWN} are drawn." if len(found.client) > MOST_DRAWN else ""
    caption = (
        "Pairs of clients that have a mask, by their most frequent class, in the same order on all "
        "axes. A distance is a share of the elements that are not in every mask. A negative "
        f"correlation means that clients with similar data have similar masks.{drawn}"
    )
    text = f"Pearson correlation over {_pairs_text(found)}: {_correlation_text(found)}"
    return Figure("similarity", f"Labels and masks. {text}{run.note}", charts, caption)


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


def _chart(found: Similarity, values: Floats, shade: Axis, title: str) -> Chart:
    """A cell for each pair of clients, without the diagonal."""
    shown = marks.evenly_spaced(len(found.client), most=MOST_DRAWN)
    names = pd.Index(found.client[shown].astype(str))
    pairs = np.where(np.eye(len(shown), dtype=bool), np.nan, values[np.ix_(shown, shown)])
    cells = pd.DataFrame(pairs, index=names.rename("client"), columns=names)
    table = cells.reset_index().melt("client", var_name="other", value_name="value")
    x, y = (Axis(name, "client", names=tuple(names)) for name in ("other", "client"))
    return marks.heat(table, x, y, shade, title=title)


def _pairs_text(found: Similarity) -> str:
    """The number of pairs, and which clients they cover if not all."""
    shown = len(found.client)
    of = f" of {shown:,} of {found.total:,} clients" if shown < found.total else " of clients"
    return f"{found.pairs:,} pairs{of}"


def _correlation_text(found: Similarity) -> str:
    value = found.correlation
    return NOTHING if math.isnan(value) else f"{value:+.3f}"
