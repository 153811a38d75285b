"""Figures for DisPFL: both stages of a round, and whether similar data lead to similar masks.

Dai et al., "DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training", ICML 2022, arXiv:2206.00187.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from safetensors.numpy import load_file

from lightfed.lab.drawing import marks
from lightfed.lab.drawing.marks import Axis, Figure
from lightfed.lab.results.groups import Group, gathered, grouped, usual_metric
from lightfed.lab.results.run import Run, reading
from lightfed.lab.results.text import NOTHING
from lightfed.lab.studies.shared import course_figures

MOST_READ = 100  # clients
AGGREGATED, TRAINED = "after aggregation", "after local training"
KINDS = {AGGREGATED: ("aggregated",), TRAINED: ("trained", "finetuned")}
CAPTION = (
    "The models of the clients, or the server's where there is one, on the clients' own test "
    "samples, before and after local training in a round. Bands: 95 % t intervals over seeds."
)
SIMILARITY = (
    f"At most {MOST_READ} clients with a mask, at most {marks.MOST_CELLS} of them drawn, by their "
    "most frequent class; a distance is a share of the elements that are not in every mask. A "
    "negative correlation means that clients with similar data have similar masks."
)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Draw a chart for each stage, a line for each method, where a method measured both stages."""
    for name, groups in gathered(grouped(runs), lambda group: group.condition).items():
        metric = usual_metric(groups)
        columns_of = {group: stage_columns(group, metric) for group in groups}
        if not any(len(columns) == len(KINDS) for columns in columns_of.values()):
            continue

        panels: dict[str, dict[Group, str]] = {stage: {} for stage in KINDS}
        for group, columns in columns_of.items():
            for stage, column in columns.items():
                panels[stage][group] = column
        both = f"{AGGREGATED} and {TRAINED}"
        yield from course_figures("stages", name, both, panels, CAPTION)


def stage_columns(group: Group, metric: str) -> dict[str, str]:
    """The column of each stage that the runs of a group measured.

    `personal/` is at one stage, `aggregated/` or `trained/` at the other. If clients keep nothing,
    `finetuned/` is the server's model after a session on the client's own data.
    """
    moment_of_personal = group.runs[0].environment.get("evaluate_at")
    found = {}
    for stage, kinds in KINDS.items():
        candidates = list(kinds)
        if moment_of_personal in kinds:
            candidates.insert(0, "personal")
        for kind in candidates:
            column = f"{kind}/{metric}"
            mean, _ = group.score(column)
            if math.isfinite(mean):
                found[stage] = column
                break
    return found


def mask_distances(run: Run) -> pd.DataFrame:
    """The Hamming distances of clients' masks, as a share of the elements that are not in all.

    masks/client<k>.safetensors has one tensor `mask` of packed words: bit i of word w is element
    32 w + i of the client's row, 1 if the client keeps it; padding is 0. At most 100 clients,
    evenly spaced by id, are read.

    Returns:
        A table of shape (K, K) by id, ascending; empty if no mask leaves anything out.

    Raises:
        UserError: A file of masks/ is damaged.
    """
    masks_of = _masks(run)
    if not masks_of:
        return pd.DataFrame()

    masks = np.stack(list(masks_of.values()))  # (K, words)
    elements = max(run.environment.get("parameters", {}).values(), default=32 * masks.shape[1])
    in_every_mask = int(np.bitwise_count(np.bitwise_and.reduce(masks)).sum())
    sparse = elements - in_every_mask
    if sparse <= 0:
        return pd.DataFrame()

    differing = []
    for mask in masks:
        differing.append(np.bitwise_count(masks ^ mask).sum(axis=1, dtype=np.int64))
    clients = list(masks_of)
    return pd.DataFrame(differing, clients, clients) / sparse


def _masks(run: Run) -> dict[int, np.ndarray]:
    """The packed words of at most 100 clients' masks, by ascending id."""
    files = {}
    for path in run.folder.glob("masks/client[0-9]*.safetensors"):
        files[int(path.stem.removeprefix("client"))] = path

    clients = sorted(files)
    masks = {}
    for place in marks.evenly_spaced(len(clients), most=MOST_READ):
        client = clients[place]
        with reading(files[client]):
            words = load_file(files[client])["mask"]
            masks[client] = words.view(np.uint32)  # otherwise the sign would not be counted
    return masks


def similarity_figure(run: Run) -> Figure | None:
    """Draw two heat maps after figure 5 of the paper, with their correlation in the title.

    They show the cosine similarity of clients' class shares, and `mask_distances`; clients come by
    their most frequent class, then by id.

    Returns:
        The figure; None without a partition or masks.

    Raises:
        UserError: A mask is damaged.
    """
    if run.partition is None:
        return None
    distances = mask_distances(run)
    if distances.empty:
        return None

    counts = run.partition.loc[distances.index]
    shares = counts.div(np.linalg.norm(counts, axis=1).clip(1.0), axis=0)
    similarities = shares @ shares.T
    order = counts.to_numpy().argmax(axis=1).argsort(kind="stable")
    similarities = similarities.iloc[order, order]
    distances = distances.iloc[order, order]

    pairs, correlation = _correlation(similarities, distances)
    correlation_text = NOTHING if math.isnan(correlation) else f"{correlation:+.3f}"
    diagonal = np.eye(len(distances), dtype=bool)
    charts = (
        marks.heat(
            similarities.mask(diagonal).rename_axis("client"),
            "other client",
            Axis("cosine similarity", ends=(0.0, 1.0), format=".2f"),
            title="Training labels of two clients",
        ),
        marks.heat(
            distances.mask(diagonal).rename_axis("client"),
            "other client",
            Axis("Hamming distance", format=".1%"),
            title="Masks of two clients",
        ),
    )
    text = f"Pearson correlation over {pairs:,} pairs of clients: {correlation_text}"
    return Figure("similarity", f"Labels and masks. {text}{run.note}", charts, SIMILARITY)


def _correlation(a: pd.DataFrame, b: pd.DataFrame) -> tuple[int, float]:
    """The number of pairs of clients, and the correlation of two (K, K) tables over them."""
    upper = np.triu_indices(len(a), k=1)
    # What varies only by rounding has no correlation.
    values = {"a": a.to_numpy()[upper].round(9), "b": b.to_numpy()[upper].round(9)}
    pairs = pd.DataFrame(values)
    return len(pairs), float(pairs.corr().to_numpy()[0, 1])
