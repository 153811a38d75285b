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
    """A chart for each stage, a line for each method, where a method measured both."""
    for name, groups in gathered(grouped(runs), lambda group: group.condition).items():
        metric = usual_metric(groups)
        columns = {group: stage_columns(group, metric) for group in groups}
        if max(map(len, columns.values())) == len(KINDS):
            panels = {
                stage: {group: own[stage] for group, own in columns.items() if stage in own}
                for stage in KINDS
            }
            both = f"{AGGREGATED} and {TRAINED}"
            yield from course_figures("stages", name, both, panels, CAPTION)


def stage_columns(group: Group, metric: str) -> dict[str, str]:
    """The column of each stage that the runs of a group measured.

    `personal/` is at one stage, `aggregated/` or `trained/` at the other. If clients keep nothing,
    `finetuned/` is the server's model after a session on the client's own data.
    """
    found, moment = {}, group.runs[0].environment.get("evaluate_at")
    for stage, kinds in KINDS.items():
        columns = [f"{k}/{metric}" for k in ["personal"] * (moment in kinds) + [*kinds]]
        if known := [name for name in columns if math.isfinite(group.score(name)[0])]:
            found[stage] = known[0]
    return found


def mask_distances(run: Run) -> pd.DataFrame:
    """The Hamming distances of clients' masks, as a share of the elements that are not in all.

    masks/client<k>.safetensors has one tensor `mask` of packed words: bit i of word w is element
    32 w + i of the client's row, 1 if the client keeps it; padding is 0. At most 100 clients,
    evenly spaced by id, are read. The table is (K, K) by id, ascending; empty if no mask leaves
    anything out. A UserError if a file of masks/ is damaged.
    """
    paths = run.folder.glob("masks/client[0-9]*.safetensors")
    files = {int(path.stem.removeprefix("client")): path for path in paths}
    clients = [sorted(files)[place] for place in marks.evenly_spaced(len(files), most=MOST_READ)]
    words = []
    for path in map(files.__getitem__, clients):
        with reading(path):
            words.append(load_file(path)["mask"].view(np.uint32))  # bits are counted with the sign
    if not words:
        return pd.DataFrame()
    masks = np.stack(words)
    elements = max(run.environment.get("parameters", {}).values(), default=32 * masks.shape[1])
    sparse = elements - int(np.bitwise_count(np.bitwise_and.reduce(masks)).sum())
    differing = [np.bitwise_count(masks ^ mask).sum(axis=1, dtype=np.int64) for mask in masks]
    return pd.DataFrame(differing, clients, clients) / sparse if sparse > 0 else pd.DataFrame()


def similarity_figure(run: Run) -> Figure | None:
    """Two heat maps after figure 5 of the paper, and their correlation in the title.

    They show the cosine similarity of clients' class shares, and `mask_distances`; clients come by
    their most frequent class, then by id. None without a partition or masks. A UserError if a mask
    is damaged.
    """
    if run.partition is None or (masks := mask_distances(run)).empty:
        return None
    counts = run.partition.loc[masks.index]
    order = counts.to_numpy().argmax(axis=1).argsort(kind="stable")
    shares = counts.div(np.linalg.norm(counts, axis=1).clip(1.0), axis=0)
    found = [values.iloc[order, order] for values in (shares @ shares.T, masks)]
    upper = np.triu_indices(len(masks), k=1)
    # what varies only by rounding has no correlation
    pairs = pd.DataFrame({k: v.to_numpy()[upper].round(9) for k, v in enumerate(found)})
    correlation = float(pairs.corr().to_numpy()[0, 1])
    said = NOTHING if math.isnan(correlation) else f"{correlation:+.3f}"
    diagonal = np.eye(len(masks), dtype=bool)
    cells = [values.mask(diagonal).rename_axis("client") for values in found]
    cosine = Axis("cosine similarity", ends=(0.0, 1.0), format=".2f")
    hamming = Axis("Hamming distance", format=".1%")
    charts = (
        marks.heat(cells[0], "other client", cosine, title="Training labels of two clients"),
        marks.heat(cells[1], "other client", hamming, title="Masks of two clients"),
    )
    text = f"Pearson correlation over {len(pairs):,} pairs of clients: {said}"
    return Figure("similarity", f"Labels and masks. {text}{run.note}", charts, SIMILARITY)
