"""Picture of the gates of a pFedMoE run: how much each client relies on its private expert.

In Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous
Personalized Federated Learning", 2024, arXiv:2402.01350, a gate weighs two experts for every
sample: a shared one for general features and the client's own. The weights add up to 1. The run
records their means over the test samples of each client and class.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Figure, Series
from lightfed.results.run import Run

MOST_ROWS = 40
MOST_CLASSES = 40
ALL = "all clients"


def gate_rows(run: Run) -> pd.DataFrame:
    """A row per client, or per group of similar clients: its group, its mean weight, its classes.

    Up to 40 clients have a row each, in the order of their ids. More are combined within their
    client group by similar mean weight, the most personal first; all rows combine about the same
    number. The weight of a class is NaN if no client of the row has test samples of it.

    Columns: `client group` and `mean` (over the classes of each client, then over the clients),
    then one for each class.
    """
    assert run.gates is not None
    weights = pd.DataFrame(run.gates.personal, columns=pd.Index(_classes(run)))
    weights = weights.dropna(how="all")
    means = weights.mean(axis=1)
    kinds = run.evaluation["group"].reindex(weights.index, fill_value=ALL)
    names = weights.index.astype(str).to_series(index=weights.index)
    if len(weights) > MOST_ROWS:
        rank = means.groupby(kinds).rank(method="first", ascending=False) - 1
        size = kinds.map(kinds.value_counts())
        rows = (MOST_ROWS * size // len(weights)).clip(lower=1)
        part = (rank * rows // size).astype(int)
        many = part.groupby([kinds, part]).transform("size")
        names = kinds + " " + (part + 1).astype(str) + " (" + many.astype(str) + " clients)"
    table = weights.assign(row=names, kind=kinds, mean=means).groupby("row", sort=False)
    found = table[[*weights, "mean"]].mean()
    found.insert(0, "client group", table["kind"].first())
    if len(weights) > MOST_ROWS:
        found = found.sort_values(["client group", "mean"], ascending=[True, False])
    return found


def gates_figure(run: Run) -> Figure | None:
    """Weights by client and class, and the mean of each client; None for a run without gates."""
    if run.gates is None or not np.isfinite(run.gates.personal).any():
        return None
    rows = gate_rows(run)
    names = tuple(rows.index.astype(str))
    shown = rows.drop(columns=["client group", "mean"])
    classes = shown.columns[marks.evenly_spaced(shown.shape[1], most=MOST_CLASSES)]
    cells = shown[classes].rename_axis("client").reset_index()
    heat = marks.heat(
        cells.melt("client", var_name="class", value_name="weight"),
        Axis("class", names=tuple(classes)),
        Axis("client", names=names),
        Axis("weight", "0: shared expert, 1: private expert", ends=(0.0, 1.0), format=".2f"),
        colours="diverging",
        middle=0.5,
        title="By class",
    )
    means = rows.rename_axis("client").reset_index()
    side = marks.bars(
        means,
        Axis("mean", "weight of the private expert", ends=(0.0, 1.0), format=".2f"),
        Axis("client", names=names),
        Series.of("client group", run.client_groups or (ALL,), "client group"),
        title="Mean over the classes of a client",
    )
    caption = (
        "Blue: samples of that class go through the client's private expert. Brown: through the "
        "shared one. Grey: half and half. Blank: no test samples. With many clients a row "
        "combines clients of one group with similar means, the most personal first."
    )
    title = f"Weight of the private expert after round {run.gates.round}{run.note}"
    return Figure("gates", title, (heat, side), caption)


def _classes(run: Run) -> list[str]:
    assert run.gates is not None
    number = run.gates.personal.shape[1]
    known = list(run.partition.counts.columns) if run.partition else []
    return known if len(known) == number else [str(i) for i in range(number)]
