"""pFedMoE and its rivals: differences by client, and a run's gates.

Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous
Personalized Federated Learning", 2024, arXiv:2402.01350. Methods are compared in one protocol: the
same data, partition, models and work, with a learning rate for each method.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from lightfed.lab.drawing import marks
from lightfed.lab.drawing.marks import Axis, Figure
from lightfed.lab.results import text
from lightfed.lab.results.groups import (
    Group,
    usual_metric,
)
from lightfed.lab.results.run import Run, finite
from lightfed.lab.results.text import readable
from lightfed.lab.studies import shared

OURS = "PFedMoE"
METHODS = (OURS, "FML", "FedKD", "FedAPEN", "FD", "FedProto", "LGFedAvg", "Standalone")
MEAN = "mean"
DIFFERENCES = (
    "Each client's model on its own test samples at the last evaluation, in runs with the same "
    "seed. A point is the mean over the seeds, a line their range."
)
GATES = (
    "Dark: samples of that class go through the client's private expert; light: through the shared "
    "one. Blank: no test samples. The last column is the mean over a client's classes. "
    f"At most {marks.MOST_CELLS} clients are drawn."
)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """How much a client's last evaluation beats that with the best baseline, by seed and client."""
    for name, groups in _protocols(runs):
        metric = usual_metric(groups)
        rival = shared.best([g for g in groups if g.algorithm != OURS], f"personal/{metric}")
        if rival is None:
            continue
        share = text.is_share(metric)
        unit = f"difference in {'percentage points' if share else readable(metric)}"
        charts = []
        for own in (group for group in groups if group.algorithm == OURS):
            gains = (_by_client(own, metric) - _by_client(rival, metric)).dropna(how="all")
            each = text.direction(metric) * (100 if share else 1) * gains.T
            ends = {"difference": each.mean(), "low": each.min(), "high": each.max()}
            table = pd.DataFrame({**ends, "series": own.label}).reset_index(names="client")
            x, y = Axis("client"), Axis("difference", unit, zero=True)
            title = f"{own.label}, {unit}"
            if len(table):
                charts.append(marks.points(table, x, y, {own.label: own.place}, title=title))
        title = f"{OURS} against {rival.label}, the best baseline, by client"
        if charts:
            yield shared.figure_of("differences", name, title, charts, DIFFERENCES, groups)


def _protocols(runs: Sequence[Run]) -> Iterator[tuple[str, list[Group]]]:
    """Those of pFedMoE, which comes first, and another method."""
    for name, groups in shared.protocols(runs, METHODS).items():
        if {OURS} < {group.algorithm for group in groups}:
            yield name, groups


def _by_client(group: Group, metric: str) -> pd.DataFrame:
    """The last values of a metric, a row a client and a column a seed; NaN if not finite."""
    tested = {run.seed: run.evaluation for run in group.runs if metric in run.evaluation}
    return finite(pd.DataFrame({seed: table[metric] for seed, table in tested.items()}))


def gates_figure(run: Run) -> Figure | None:
    """The private expert's weight by client and class, with the mean; None without gates.

    gate.npz has `personal`, (clients, classes): the mean weight of a client's private expert over
    its test samples of a class, NaN without any; the shared expert has the rest.
    """
    gates = run.arrays("gate")
    if not gates or not np.isfinite(gates["personal"]).any():
        return None
    classes = None if run.partition is None else run.partition.columns
    weights = pd.DataFrame(gates["personal"].astype(float), columns=classes).dropna(how="all")
    weights = weights.assign(**{MEAN: weights.mean(axis=1)}).rename_axis("client")
    shade = Axis("weight", "0: shared expert, 1: private expert", ends=(0.0, 1.0), format=".2f")
    chart = marks.heat(weights, "class", shade, title="By class")
    title = f"Weight of the private expert after round {gates['round']}{run.note}"
    return Figure("gates", title, (chart,), GATES)
