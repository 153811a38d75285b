"""Figures for DisPFL: both stages of a round, and whether similar data lead to similar masks.

Dai et al., "DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training", ICML 2022, arXiv:2206.00187.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors.numpy import load_file

from lightfed.drawing import marks
from lightfed.drawing.marks import Axis, Chart, Figure
from lightfed.results.groups import Group, gathered, grouped, usual_metric
from lightfed.results.run import Run, reading, traffic
from lightfed.results.text import NOTHING, readable
from lightfed.studies.shared import course_charts, figures_of

MOST_READ, MOST_DRAWN = 100, 40  # clients
AGGREGATED, TRAINED = "after aggregation", "after local training"
KINDS = {AGGREGATED: ("aggregated",), TRAINED: ("trained", "finetuned")}
MOMENTS = {"aggregated": AGGREGATED, "trained": TRAINED}  # as in environment.json
CAPTION = (
    "The models of the clients, or the server's where there is one, on the clients' own test "
    "samples, before and after local training in a round. Bands: 95 % t intervals over seeds."
)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """A chart for each stage, a line for each method, where a method measured both."""
    for name, groups in gathered(grouped(runs), lambda group: group.condition).items():
        metric = usual_metric(groups)
        columns = {group: stage_columns(group, metric) for group in groups}
        if all(len(own) < len(KINDS) for own in columns.values()):
            continue
        panels = {
            stage.capitalize(): {g: own[stage] for g, own in columns.items() if stage in own}
            for stage in KINDS
        }
        charts = course_charts(panels, {group: group.label for group in groups}, metric)
        title = f"{readable(metric)} {AGGREGATED} and {TRAINED}"
        yield from figures_of("stages", name, title, charts, CAPTION, groups)


def stage_columns(group: Group, metric: str) -> dict[str, str]:
    """The column of each stage that the runs of a group measured.

    `personal/` is at one stage, `aggregated/` or `trained/` at the other. If clients keep nothing,
    `finetuned/` is the server's model after a session on the client's own data.
    """

    def first(*kinds: str) -> str:
        columns = (f"{kind}/{metric}" for kind in kinds)
        return next((name for name in columns if math.isfinite(group.score(name)[0])), "")

    sends = any(traffic(run).max() > 0 for run in group.runs)  # else it never aggregates
    usual = AGGREGATED if sends and not first("aggregated") else TRAINED
    personal = MOMENTS.get(str(group.runs[0].environment.get("evaluate_at")), usual)
    found = {
        stage: first(*["personal"] * (stage == personal), *kinds) for stage, kinds in KINDS.items()
    }
    return {stage: column for stage, column in found.items() if column}


def mask_distances(run: Run) -> pd.DataFrame:
    """The Hamming distances of clients' masks, as a share of the elements that are not in all.

    masks/client<k>.safetensors has one tensor `mask` of packed words: bit i of word w is element
    32 w + i of the client's row, 1 if the client keeps it; padding is 0. At most 100 clients,
    evenly spaced by id, are read.

    Returns:
        (K, K) by id, ascending; empty if no mask leaves anything out.

    Raises:
        UserError: a file of masks/ is damaged.
    """
    paths = run.folder.glob("masks/client[0-9]*.safetensors")
    files = {int(path.stem.removeprefix("client")): path for path in paths}
    clients = [sorted(files)[place] for place in marks.evenly_spaced(len(files), most=MOST_READ)]
    if not clients:
        return pd.DataFrame()
    masks = np.stack([_words(files[client]) for client in clients])
    elements = max(run.environment.get("parameters", {}).values(), default=32 * masks.shape[1])
    sparse = elements - int(np.bitwise_count(np.bitwise_and.reduce(masks)).sum())
    differing = [np.bitwise_count(masks ^ mask).sum(axis=1, dtype=np.int64) for mask in masks]
    return pd.DataFrame(differing, clients, clients) / sparse if sparse > 0 else pd.DataFrame()


def similarity(run: Run) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Cosine similarity of clients' class shares, and `mask_distances`: both (K, K).

    Clients are sorted by their most frequent class, then by id. None without a partition or masks.
    A UserError if a mask is damaged.
    """
    if run.partition is None:
        return None
    masks, counts = mask_distances(run), run.partition
    if masks.empty:
        return None
    own = counts.loc[masks.index].to_numpy()
    order = masks.index[own.argmax(axis=1).argsort(kind="stable")]
    shares = counts.loc[order]
    shares = shares.div(np.maximum(1.0, np.linalg.norm(shares, axis=1)), axis=0)
    return shares @ shares.T, masks.loc[order, order]


def similarity_figure(run: Run) -> Figure | None:
    """Two heat maps after figure 5 of the paper, and their correlation in the title."""
    if (found := similarity(run)) is None:
        return None
    labels, masks = found
    upper = np.triu_indices(len(masks), k=1)
    # what varies only by rounding has no correlation
    pairs = np.stack([values.to_numpy()[upper] for values in found]).round(9)
    alike = pairs.std(axis=1).min() == 0
    cosine = Axis("value", "cosine similarity", ends=(0.0, 1.0), format=".2f")
    charts = (
        _heat(labels, cosine, "Training labels of two clients"),
        _heat(masks, Axis("value", "Hamming distance", format=".1%"), "Masks of two clients"),
    )
    correlation = NOTHING if alike else f"{np.corrcoef(pairs)[0, 1]:+.3f}"
    text = f"Pearson correlation over {len(upper[0]):,} pairs of clients: {correlation}"
    caption = (
        f"At most {MOST_READ} clients with a mask, of which {MOST_DRAWN} are drawn, by their most "
        "frequent class; a distance is a share of the elements that are not in every mask. A "
        "negative correlation means that clients with similar data have similar masks."
    )
    return Figure("similarity", f"Labels and masks. {text}{run.note}", charts, caption)


def _heat(values: pd.DataFrame, shade: Axis, title: str) -> Chart:
    """A cell for each pair of clients, without the diagonal."""
    shown = marks.evenly_spaced(len(values), most=MOST_DRAWN)
    cells = values.iloc[shown, shown].mask(np.eye(len(shown), dtype=bool))
    cells = cells.rename(str, axis=0).rename(str, axis=1).rename_axis("client")
    x, y = (Axis(name, names=tuple(cells.index)) for name in ("other client", "client"))
    table = cells.reset_index().melt("client", var_name="other client")
    return marks.heat(table, x, y, shade, title=title)


def _words(path: Path) -> np.ndarray:
    """(W,) the words of one mask."""
    with reading(path):
        words = load_file(path)["mask"]
    return words.view(np.uint32)  # whose bits are counted with the sign
