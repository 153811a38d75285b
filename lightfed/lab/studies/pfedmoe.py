"""pFedMoE and its rivals: differences by client, and a run's gates.

Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous
Personalized Federated Learning", 2024, arXiv:2402.01350. Methods are compared in one protocol: the
same data, partition, models and work, with a learning rate for each method.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from lightfed.lab.drawing import marks
from lightfed.lab.drawing.marks import Axis, Chart, Figure
from lightfed.lab.results import text
from lightfed.lab.results.groups import Group, usual_metric
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
    """Draw how much a client's last evaluation beats that of the best baseline, by client.

    There is a figure for each protocol, and in it a chart for each experiment of pFedMoE.
    """
    for name, groups in _protocols(runs):
        metric = usual_metric(groups)
        baselines = [group for group in groups if group.algorithm != OURS]
        rival = shared.best(baselines, f"personal/{metric}")
        if rival is None:
            continue

        charts = []
        for group in groups:
            if group.algorithm == OURS:
                chart = _differences(group, rival, metric)
                if chart is not None:
                    charts.append(chart)
        if charts:
            title = f"{OURS} against {rival.label}, the best baseline, by client"
            yield shared.figure_of("differences", name, title, charts, DIFFERENCES, groups)


def _differences(group: Group, rival: Group, metric: str) -> Chart | None:
    """A chart of the gains of each client over a rival, with their range over seeds.

    Returns:
        The chart; None if no client was tested in both with the same seed.
    """
    gains = _by_client(group, metric) - _by_client(rival, metric)
    gains = gains.dropna(how="all")
    in_points = 100 if text.is_share(metric) else 1
    of_seeds = text.direction(metric) * in_points * gains.T  # (seeds, clients)

    unit = "percentage points" if text.is_share(metric) else readable(metric)
    heading = f"difference in {unit}"
    columns = {"difference": of_seeds.mean(), "low": of_seeds.min(), "high": of_seeds.max()}
    table = pd.DataFrame({**columns, "series": group.label}).reset_index(names="client")
    if not len(table):
        return None
    return marks.points(
        table,
        Axis("client"),
        Axis("difference", heading, zero=True),
        {group.label: group.place},
        title=f"{group.label}, {heading}",
    )


def _protocols(runs: Sequence[Run]) -> Iterator[tuple[str, list[Group]]]:
    """The protocols that have pFedMoE, which comes first, and another method."""
    for name, groups in shared.protocols(runs, METHODS).items():
        algorithms = {group.algorithm for group in groups}
        if OURS in algorithms and len(algorithms) > 1:
            yield name, groups


def _by_client(group: Group, metric: str) -> pd.DataFrame:
    """The last values of a metric, a row a client and a column a seed; NaN if not finite."""
    values = {}
    for run in group.runs:
        if metric in run.evaluation:
            values[run.seed] = run.evaluation[metric]
    return finite(pd.DataFrame(values))


def gates_figure(run: Run) -> Figure | None:
    """Draw the private expert's weight by client and class, with the mean over classes.

    gate.npz has `personal`, of shape (clients, classes): the mean weight of a client's private
    expert over its test samples of a class, NaN without any; the shared expert has the rest.

    Returns:
        The figure; None if the run has no gates.
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
