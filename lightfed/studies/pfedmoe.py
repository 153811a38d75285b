"""pFedMoE and its rivals: gains, costs to a target, differences by client, and a run's gates.

Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous
Personalized Federated Learning", 2024, arXiv:2402.01350. Methods are compared in one protocol: the
same data, partition, models and work, with a learning rate for each method.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Figure, Series
from lightfed.results import units
from lightfed.results.csvfile import finite
from lightfed.results.groups import Group, runs_of, usual_metric
from lightfed.results.intervals import CHOSEN, INTERVAL, paired
from lightfed.results.outcome import reached_by_all
from lightfed.results.run import Run
from lightfed.results.tables import readable, sentence
from lightfed.studies import shared

OURS = "PFedMoE"
# as in section 2.1 of the paper, which compares pFedMoE with FedAPEN
KINDS = {
    **dict.fromkeys((OURS, "FML", "FedKD", "FedAPEN"), "mutual learning"),
    **dict.fromkeys(("FD", "FedProto"), "distillation"),
    "LGFedAvg": "model mixing",
    "Standalone": units.NOTHING,
}
# arguments of pFedMoE that the paper does not have: a run with another value is an ablation
PARTS = {"gate": "paper", "federate": "true"}
GAINS = f"Gains are taken seed by seed; in brackets their {INTERVAL}. {CHOSEN}"
MEAN = "mean of the classes"
DIFFERENCES = (
    "Each client's model on its own test samples at the last evaluation, in runs with the same "
    "seed. A point is the mean over the seeds, a line their range."
)
GATES = (
    "Blue: samples of that class go through the client's private expert; brown: through the "
    "shared one. Blank: no test samples. The last column is the mean over a client's classes. "
    f"At most {shared.MOST_DRAWN} clients are drawn."
)


def tables(runs: Sequence[Run], *, target: float | None = None) -> Iterator[shared.StudyTable]:
    """The methods of each protocol; the target is by default what all runs reached."""
    for name, groups in _protocols(runs):
        column = f"personal/{usual_metric(groups)}"
        goal = reached_by_all(runs_of(groups), column) if target is None else target
        further = {
            "over the best other": [_gain(group, groups, column) for group in groups],
            "kind": [*map(_kind, groups)],
            "over the best of its kind": [_gain(g, groups, column, alike=True) for g in groups],
        }
        columns = {readable(column): column}
        yield shared.table_of("methods", name, groups, columns, goal, further, GAINS)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """How much a client's last evaluation beats that with the best baseline, by seed and client."""
    for name, groups in _protocols(runs):
        metric = usual_metric(groups)
        rival = shared.best([g for g in groups if g.algorithm != OURS], f"personal/{metric}")
        if rival is None:
            continue
        gains = (_by_client(groups[0], metric) - _by_client(rival, metric)).dropna(how="all")
        share, label = units.is_share(metric), groups[0].label
        each = units.direction(metric) * (100 if share else 1) * gains.T
        table = pd.DataFrame({"difference": each.mean(), "low": each.min(), "high": each.max()})
        unit = f"difference in {'percentage points' if share else readable(metric)}"
        y, by = Axis("difference", unit, zero=True), Series("series", {label: groups[0].place})
        table = table.assign(series=label).reset_index(names="client")
        chart = marks.points(table, Axis("client"), y, by, title=sentence(unit))
        title = f"{label} against {rival.label}, the best baseline, by client"
        if len(table):
            yield shared.figure_of("differences", name, title, [chart], DIFFERENCES, groups)


def _protocols(runs: Sequence[Run]) -> Iterator[tuple[str, list[Group]]]:
    """Those of pFedMoE and another method; pFedMoE comes first, then its ablations."""
    for name, groups in shared.protocols(runs, [*KINDS]).items():
        if {OURS} < {group.algorithm for group in groups}:
            yield (
                name,
                sorted(groups, key=lambda g: (g.algorithm != OURS, _kind(g) == units.NOTHING)),
            )


def _kind(group: Group) -> str:
    """That of the paper; an ablation of pFedMoE has none."""
    settings = group.runs[0].settings
    stated = {key: settings.get(f"model.algorithm.init_args.{key}", PARTS[key]) for key in PARTS}
    return units.NOTHING if group.algorithm == OURS and stated != PARTS else KINDS[group.algorithm]


def _gain(own: Group, groups: Sequence[Group], column: str, *, alike: bool = False) -> str:
    """Over the best of other methods, perhaps of its kind alone: `+2.00 (-0.48 to 4.48)`."""
    kinds = {_kind(own)} - {units.NOTHING} if alike else {*KINDS.values()}
    others = [g for g in groups if g.algorithm != own.algorithm and _kind(g) in kinds]
    rival = shared.best(others, column)
    found = paired(own, rival, column, (column, column)) if rival else None
    if found is None or not found.seeds:
        return units.NOTHING
    return f"{found.gain} ({found.interval})" if found.interval else found.gain


def _by_client(group: Group, metric: str) -> pd.DataFrame:
    """The last values of a metric, a row a client and a column a seed; NaN if not finite."""
    tested = {run.seed: run.evaluation for run in group.runs if metric in run.client_metrics}
    return finite(pd.DataFrame({seed: table[metric] for seed, table in tested.items()}))


def gates_figure(run: Run) -> Figure | None:
    """The private expert's weight by client and class, with the mean; None without gates."""
    if run.gates is None or not np.isfinite(run.gates.personal).any():
        return None
    classes = run.partition.counts.columns if run.partition else None
    weights = pd.DataFrame(run.gates.personal, columns=classes).dropna(how="all")
    weights = weights.assign(**{MEAN: weights.mean(axis=1)}).rename_axis("client")
    shade = Axis("weight", "0: shared expert, 1: private expert", ends=(0.0, 1.0), format=".2f")
    chart = shared.heat_of(weights, "class", shade, "By class", colours="diverging", middle=0.5)
    title = f"Weight of the private expert after round {run.gates.round}{run.note}"
    return Figure("gates", title, (chart,), GATES)
