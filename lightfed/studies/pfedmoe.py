"""pFedMoE and its rivals: gains, costs to a target, differences by client, and a run's gates.

Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous
Personalized Federated Learning", 2024, arXiv:2402.01350. Methods are compared in one protocol: the
same data, partition, models and work, with a learning rate for each method.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Figure, Series
from lightfed.results import units
from lightfed.results.groups import Group, runs_of, usual_metric
from lightfed.results.intervals import CHOSEN, INTERVAL, paired
from lightfed.results.outcome import reached_by_all
from lightfed.results.run import Run
from lightfed.results.tables import readable
from lightfed.studies import shared

OURS = "PFedMoE"
# kinds in section 2.1 of the paper, by how clients learn from each other. The section compares
# pFedMoE with FedAPEN, so it has the kind of methods with a small shared model
KINDS = {
    OURS: "mutual learning",
    "FML": "mutual learning",
    "FedKD": "mutual learning",
    "FedAPEN": "mutual learning",
    "FD": "distillation",
    "FedProto": "distillation",
    "LGFedAvg": "model mixing",
    "Standalone": units.NOTHING,
}
# arguments of pFedMoE that the paper does not have: a run with another value is an ablation
PARTS = {"gate": "paper", "federate": "true"}
GAINS = f"Gains are taken seed by seed; in brackets their {INTERVAL}. {CHOSEN}"
AHEAD, BEHIND = "ahead", "behind"
MEAN = "mean of the classes"
MOST_SHOWN = 40  # clients, and classes, of the gates
DIFFERENCES = (
    "Each client's model on its own test samples at the last evaluation, in runs with the same "
    "seed. A point is the mean over the seeds, a line their range."
)
GATES = (
    "Blue: samples of that class go through the client's private expert; brown: through the "
    "shared one. Blank: no test samples. The last column is the mean over a client's classes. "
    f"At most {MOST_SHOWN} clients are drawn."
)


def tables(runs: Sequence[Run], *, target: float | None = None) -> Iterator[shared.StudyTable]:
    """The methods of each protocol; the target is by default what all runs reached."""
    for name, groups in _protocols(runs).items():
        column, every = f"personal/{usual_metric(groups)}", runs_of(groups)
        goal = reached_by_all(every, column) if target is None else target
        further = []
        for group in groups:
            kind = _kind(group)
            others = [other for other in groups if other.algorithm != group.algorithm]
            alike = [other for other in others if kind == _kind(other) != units.NOTHING]
            gain = _gain(group, others, column)
            further.append(
                {
                    "over the best other": gain,
                    "kind": kind,
                    "over the best of its kind": _gain(group, alike, column),
                }
            )
        columns = {readable(column): column}
        yield shared.table_of("methods", name, groups, columns, goal, further, GAINS)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """How much a client's last evaluation beats that with the best baseline, by seed and client."""
    for name, groups in _protocols(runs).items():
        metric = usual_metric(groups)
        rival = shared.best([g for g in groups if g.algorithm != OURS], f"personal/{metric}")
        ours = _by_client(groups[0], metric)
        if rival is None or (gains := (ours - _by_client(rival, metric)).dropna()).empty:
            continue
        share = units.is_share(metric)
        each = (units.direction(metric) * (100 if share else 1) * gains).groupby("client")
        table = pd.DataFrame({"difference": each.mean(), "low": each.min(), "high": each.max()})
        table["series"] = (table["difference"] >= 0).map({True: AHEAD, False: BEHIND})
        label = f"difference in {'percentage points' if share else readable(metric)}"
        y, by = Axis("difference", label, zero=True), Series.of("series", (AHEAD, BEHIND), OURS)
        chart = marks.points(table.reset_index(), Axis("client"), y, by, title=label.capitalize())
        title = f"{groups[0].label} against {rival.label}, the best baseline, by client"
        yield shared.figure_of("differences", name, title, [chart], DIFFERENCES, groups)


def _protocols(runs: Sequence[Run]) -> dict[str, list[Group]]:
    """Those of pFedMoE and another method; pFedMoE comes first, then its ablations."""
    found = {
        name: sorted(groups, key=lambda g: (g.algorithm != OURS, _kind(g) == units.NOTHING))
        for name, groups in shared.protocols(runs, [*KINDS]).items()
    }
    return {n: own for n, own in found.items() if {OURS} < {g.algorithm for g in own}}


def _kind(group: Group) -> str:
    """That of the paper; an ablation of pFedMoE has none."""
    settings = group.runs[0].settings
    stated = {key: settings.get(f"model.algorithm.init_args.{key}", PARTS[key]) for key in PARTS}
    return units.NOTHING if group.algorithm == OURS and stated != PARTS else KINDS[group.algorithm]


def _gain(group: Group, rivals: Sequence[Group], column: str) -> str:
    """Over the best of them: `+2.00 (-0.48 to 4.48)`, in percentage points or the metric's unit."""
    rival = shared.best(rivals, column)
    found = paired(group, rival, column, (column, column)) if rival else None
    if found is None or not found.seeds:
        return units.NOTHING
    return f"{found.gain} ({found.interval})" if found.interval else found.gain


def _by_client(group: Group, metric: str) -> pd.Series[float]:
    """The last finite values of a metric by seed and client."""
    runs = [run for run in group.runs if metric in run.client_metrics]
    known = {run.seed: run.evaluation[metric].replace(np.inf, np.nan) for run in runs}
    return pd.concat(known or {0: pd.Series(dtype=float)}, names=["seed", "client"])


def gates_figure(run: Run) -> Figure | None:
    """The weight of the private expert by client and class, and its mean over a client's classes.

    None for a run without gates. At most 40 clients and classes are drawn, evenly spaced.
    """
    if run.gates is None or not np.isfinite(run.gates.personal).any():
        return None
    classes = run.partition.counts.columns if run.partition else None
    every = pd.DataFrame(run.gates.personal, columns=classes).dropna(how="all")
    every = every.iloc[marks.evenly_spaced(len(every), most=MOST_SHOWN)]
    shown = every.iloc[:, marks.evenly_spaced(every.shape[1], most=MOST_SHOWN)]
    shown = shown.assign(**{MEAN: every.mean(axis=1)})
    shown = shown.rename_axis(index="client", columns="class")
    shade = Axis("weight", "0: shared expert, 1: private expert", ends=(0.0, 1.0), format=".2f")
    chart = shared.heat_of(shown, shade, "By class", colours="diverging", middle=0.5)
    title = f"Weight of the private expert after round {run.gates.round}{run.note}"
    return Figure("gates", title, (chart,), GATES)
