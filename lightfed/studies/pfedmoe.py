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
from lightfed.drawing.marks import Axis, Figure, Series
from lightfed.results import text
from lightfed.results.groups import (
    CHOSEN,
    INTERVAL,
    Group,
    paired,
    reached_by_all,
    runs_of,
    usual_metric,
)
from lightfed.results.run import Run
from lightfed.results.text import readable
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
    "Standalone": text.NOTHING,
}
# arguments of pFedMoE that the paper does not have: a run with another value is an ablation
PARTS = {"gate": "paper", "federate": "true"}
GAINS = f"Gains are taken seed by seed; in brackets their {INTERVAL}. {CHOSEN}"
AHEAD, BEHIND = "ahead", "behind"
MEAN = "mean of the classes"
MOST_SHOWN = 40  # clients, and classes, of the gates


def tables(runs: Sequence[Run], *, target: float | None = None) -> Iterator[shared.StudyTable]:
    """The methods of each protocol; the target is by default what all runs reached."""
    for name, groups in _protocols(runs).items():
        column, every = f"personal/{usual_metric(groups)}", runs_of(groups)
        goal = reached_by_all(every, column) if target is None else target
        rows = []
        for group, score in zip(groups, shared.starred(groups, column), strict=True):
            kind = _kind(group)
            others = [other for other in groups if other.algorithm != group.algorithm]
            alike = [other for other in others if kind == _kind(other) != text.NOTHING]
            rows.append(
                {
                    "method": group.label,
                    "kind": kind,
                    readable(column): score,
                    "over the best other": _gain(group, shared.best(others, column), column),
                    "over the best of its kind": _gain(group, shared.best(alike, column), column),
                    **shared.cost_cells(group, column, goal, every),
                }
            )
        yield shared.table_of("methods", name, rows, GAINS, groups)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """How much a client's last evaluation beats that with the best baseline, by seed and client."""
    for name, groups in _protocols(runs).items():
        metric = usual_metric(groups)
        rival = shared.best([g for g in groups if g.algorithm != OURS], f"personal/{metric}")
        ours = _by_client(groups[0], metric)
        if rival is None or (gains := (ours - _by_client(rival, metric)).dropna()).empty:
            continue
        share = text.is_share(metric)
        each = (text.direction(metric) * (100 if share else 1) * gains).groupby("client")
        table = pd.DataFrame({"difference": each.mean(), "low": each.min(), "high": each.max()})
        table["series"] = (table["difference"] >= 0).map({True: AHEAD, False: BEHIND})
        label = f"difference in {'percentage points' if share else readable(metric)}"
        y, by = Axis("difference", label, zero=True), Series.of("series", (AHEAD, BEHIND), OURS)
        chart = marks.points(table.reset_index(), Axis("client"), y, by, title=label.capitalize())
        caption = (
            "Each client's model on its own test samples at the last evaluation, in runs with the "
            "same seed. A point is the mean over the seeds, a line their range."
        )
        title = f"{groups[0].label} against {rival.label}, the best baseline, by client"
        yield from shared.figures_of("differences", name, title, [chart], caption, groups)


def _protocols(runs: Sequence[Run]) -> dict[str, list[Group]]:
    """Those of pFedMoE and another method; pFedMoE comes first, then its ablations."""
    found = {
        name: sorted(groups, key=lambda g: (g.algorithm != OURS, _kind(g) == text.NOTHING))
        for name, groups in shared.protocols(runs, [*KINDS]).items()
    }
    return {n: own for n, own in found.items() if {OURS} < {g.algorithm for g in own}}


def _kind(group: Group) -> str:
    """That of the paper; an ablation of pFedMoE has none."""
    settings = group.runs[0].settings
    stated = {key: settings.get(f"model.algorithm.init_args.{key}", PARTS[key]) for key in PARTS}
    return text.NOTHING if group.algorithm == OURS and stated != PARTS else KINDS[group.algorithm]


def _gain(group: Group, rival: Group | None, column: str) -> str:
    """`+2.00 (-0.48 to 4.48)`, in percentage points or the metric's unit."""
    found = paired(group, rival, column, (column, column)) if rival else None
    if found is None or not found.seeds:
        return text.NOTHING
    return f"{found.gain} ({found.interval})" if found.interval else found.gain


def _by_client(group: Group, metric: str) -> pd.Series[float]:
    """The last finite values of a metric by seed and client."""
    runs = [run for run in group.runs if metric in run.evaluation]
    known = {run.seed: run.evaluation[metric].replace(np.inf, np.nan) for run in runs}
    return pd.concat(known or {0: pd.Series(dtype=float)}, names=["seed", "client"])


def gates_figure(run: Run) -> Figure | None:
    """The weight of the private expert by client and class, and its mean over a client's classes.

    None for a run without gates. At most 40 clients and classes are drawn, evenly spaced.
    """
    if run.gates is None or not np.isfinite(run.gates.personal).any():
        return None
    classes = None if run.partition is None else run.partition.columns
    every = pd.DataFrame(run.gates.personal, columns=classes).rename(columns=str).dropna(how="all")
    every = every.iloc[marks.evenly_spaced(len(every), most=MOST_SHOWN)]
    shown = every.iloc[:, marks.evenly_spaced(every.shape[1], most=MOST_SHOWN)]
    shown = shown.assign(**{MEAN: every.mean(axis=1)}).rename(index=str).rename_axis("client")
    chart = marks.heat(
        shown.reset_index().melt("client", var_name="class", value_name="weight"),
        Axis("class", names=tuple(shown.columns)),
        Axis("client", names=tuple(shown.index)),
        Axis("weight", "0: shared expert, 1: private expert", ends=(0.0, 1.0), format=".2f"),
        middle=0.5,
        title="By class",
    )
    caption = (
        "Blue: samples of that class go through the client's private expert; brown: through the "
        "shared one. Blank: no test samples. The last column is the mean over a client's classes. "
        f"At most {MOST_SHOWN} clients are drawn."
    )
    title = f"Weight of the private expert after round {run.gates.round}{run.note}"
    return Figure("gates", title, (chart,), caption)
