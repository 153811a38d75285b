"""pFedMoE and its rivals: gains, differences by client, costs, robustness, and a run's gates.

Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous
Personalized Federated Learning", 2024, arXiv:2402.01350. Methods are compared in one protocol: the
same data, partition, models and work, with a learning rate for each method.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Figure, Series
from lightfed.drawing.tidy import metric_axis_of, score_row, stacked
from lightfed.results import units
from lightfed.results.columns import base_name
from lightfed.results.groups import (
    Group,
    final_text,
    grouped,
    runs_of,
    synthetic_note,
    usual_metric,
)
from lightfed.results.intervals import CHOSEN, INTERVAL, Paired, goal_text, paired, resolution_text
from lightfed.results.outcome import best_of, costs_to, reached_by_all
from lightfed.results.run import Run
from lightfed.results.settings import gathered, options, told_apart
from lightfed.results.tables import readable, text_table
from lightfed.studies.shared import conditions, figures_of

OURS = "pFedMoE"
MUTUAL, DISTILLATION = "mutual learning", "distillation"
# by class: name in the paper and kind in its section 2.1, by how clients learn from each other. The
# section compares pFedMoE with FedAPEN, so it has the kind of methods with a small shared model
METHODS = {
    "PFedMoE": (OURS, MUTUAL),
    "FML": ("FML", MUTUAL),
    "FedKD": ("FedKD", MUTUAL),
    "FedAPEN": ("FedAPEN", MUTUAL),
    "FD": ("FD", DISTILLATION),
    "FedProto": ("FedProto", DISTILLATION),
    "LGFedAvg": ("LG-FedAvg", "model mixing"),
    "Standalone": ("Standalone", ""),
}
# settings of which a protocol may hold several; all others it has in common
FREE = re.compile(r"model\.(algorithm(\.|$)|clients\.\d+\.name$|optimizer\.init_args\.lr$)")
COMMON = re.compile(
    rf"(?!{FREE.pattern})|model\.algorithm\.(class_path|init_args\.(gate|federate))$"
)
# arguments of pFedMoE that the paper does not have: a run with another value is an ablation
PARTS = {"gate": "paper", "federate": "true"}
FACTORS = {
    "partition per_client": "classes of a client",
    "partition alpha": "gamma, the concentration of classes",
}
AHEAD, BEHIND = "ahead", "behind"
EVERYONE = "all clients"
MOST_SHOWN = 40  # clients, and classes, of the gates


@dataclass(frozen=True, eq=False)
class Method:
    """One experiment, with the paper's name and kind; an ablation has no kind.

    The label says in what it differs if a protocol has two of one method.
    """

    group: Group
    name: str
    kind: str
    label: str


@dataclass(frozen=True, eq=False)
class Protocol:
    """pFedMoE and at least one other method under the same conditions, in the order of METHODS.

    Its name has the options in which it differs from most others on its data.
    """

    name: str
    metric: str
    members: tuple[Method, ...]
    options: dict[str, str]

    @property
    def column(self) -> str:
        return f"personal/{self.metric}"

    @property
    def groups(self) -> list[Group]:
        return [method.group for method in self.members]

    @property
    def title(self) -> str:
        return self.name + synthetic_note(self.groups)

    def best(self, kind: str | None = None, but: str = "") -> Method | None:
        """The best experiment, of a kind if one is named, without those of a method."""
        asked = [m for m in self.members if m.name != but and kind in (None, m.kind)]
        scores = {m: m.group.score(self.column)[0] for m in asked}
        known = {method: score for method, score in scores.items() if math.isfinite(score)}
        return best_of(known, self.metric) if known else None

    def gain(self, method: Method, rival: Method) -> Paired:
        """By how much a method beats another, seed by seed."""
        return paired(method.group, rival.group, self.metric, (self.column, self.column))

    def gain_text(self, method: Method, rival: Method | None) -> str:
        """`+2.00 (-0.48 to 4.48)`, in percentage points or the metric's unit."""
        if rival is None or not (found := self.gain(method, rival)).seeds:
            return units.NOTHING
        return f"{found.gain} ({found.interval})" if found.interval else found.gain

    def target(self, asked: float | None) -> float:
        """The value asked for, else the best that all methods reached with every seed."""
        return reached_by_all(runs_of(self.groups), self.column) if asked is None else asked

    def goal(self, asked: float | None) -> str:
        """`75.00 % personal accuracy, resolution 1 round`."""
        resolution = resolution_text(runs_of(self.groups), self.column)
        return f"{goal_text(self.column, self.target(asked))}, resolution {resolution}"


def protocols(runs: Sequence[Run]) -> list[Protocol]:
    """The protocols in these runs."""
    groups = [g for g in grouped(runs) if g.algorithm in METHODS and g.runs[0].config]
    known = {group: options(group.runs[0].settings, but=FREE) for group in groups}
    every = gathered(groups, lambda group: (group.data, frozenset(known[group].items()))).values()
    met = [own for own in every if {"PFedMoE"} < {group.algorithm for group in own}]
    shared = [known[own[0]] for own in met]
    return [
        Protocol(name, usual_metric(own), tuple(_methods(own)), stated)
        for name, own, stated in zip(
            conditions([own[0].data for own in met], shared), met, shared, strict=True
        )
    ]


def method_table(protocol: Protocol, asked: float | None = None) -> pd.DataFrame:
    """A row of text per method, a star before the best; for `asked` see `Protocol.target`."""
    target, rows = protocol.target(asked), []
    for method in protocol.members:
        rounds, sent, flops = costs_to(target, method.group.runs, protocol.column)
        alike = protocol.best(method.kind, but=method.name) if method.kind else None
        star = "*" * (method is protocol.best())
        rows.append(
            {
                "method": method.label,
                "kind": method.kind or units.NOTHING,
                readable(protocol.column): star + final_text(method.group, protocol.column),
                "over the best other": protocol.gain_text(method, protocol.best(but=method.name)),
                "over the best of its kind": protocol.gain_text(method, alike),
                f"rounds to {protocol.goal(asked)}": (
                    units.NOTHING if math.isnan(rounds) else f"{rounds:.3g}"
                ),
                "bytes until then": units.bytes_text(sent),
                "FLOPs until then": units.flops_text(flops),
            }
        )
    return text_table(rows)


def notes(protocol: Protocol) -> list[str]:
    """The gains of pFedMoE over the best baselines, and how to read the table."""
    ours = protocol.members[0]
    rivals = {"the best baseline": protocol.best(but=OURS)}
    if ours.kind:
        rivals[f"the best of its kind ({ours.kind})"] = protocol.best(ours.kind, but=OURS)
    gains = [
        protocol.gain(ours, other).sentence(ours.label, other.label, role=role)
        for role, other in rivals.items()
        if other is not None
    ]
    return [
        f"{ours.label}: {'; '.join(gains) or 'no baseline was measured'}.",
        "Mean over the clients, each with its own model and test samples, and 95 % t interval over "
        "the seeds; the best has a star. Gains are taken seed by seed; in brackets their "
        f"{INTERVAL}, which needs two seeds. {CHOSEN}",
        "Rounds, bytes (up and down) and FLOPs of all clients until the target was first measured: "
        "mean over the seeds, a dash unless all reached it.",
    ]


def figures(runs: Sequence[Run], *, target: float | None = None) -> list[Figure]:
    """Differences by client and costs of each protocol, then robustness over protocols."""
    compared = protocols(runs)
    drawn = [figure for one in compared for figure in (*_differences(one), *_costs(one, target))]
    return drawn + [figure for factor in FACTORS for figure in _robustness(compared, factor)]


def _methods(groups: Sequence[Group]) -> list[Method]:
    """In the order of METHODS, pFedMoE before its ablations, with labels that differ."""
    changes = {group: _changed(group) for group in groups}
    order = [*METHODS]
    found = []
    for group in sorted(groups, key=lambda g: (order.index(g.algorithm), len(changes[g]) > 0)):
        name, kind = METHODS[group.algorithm]
        alike = [other for other in groups if other.algorithm == group.algorithm]
        texts = told_apart([options(other.runs[0].settings, but=COMMON) for other in alike])
        label = ", ".join(filter(None, (name, *changes[group], texts[alike.index(group)])))
        found.append(Method(group, name, "" if changes[group] else kind, label))
    return found


def _changed(group: Group) -> list[str]:
    """The parts of pFedMoE that an ablation changes: `federate false`."""
    settings = group.runs[0].settings
    stated = {key: settings.get(f"model.algorithm.init_args.{key}", PARTS[key]) for key in PARTS}
    return [f"{key} {text}" for key, text in stated.items() if text != PARTS[key]]


def _differences(protocol: Protocol) -> list[Figure]:
    """How much a client's last evaluation beats that with the best baseline, by seed and client."""
    metric, baseline = protocol.metric, protocol.best(but=OURS)
    if baseline is None:
        return []

    def last(method: Method) -> pd.Series[float]:
        runs = [run for run in method.group.runs if metric in run.client_metrics]
        known = {run.seed: run.evaluation[metric].replace(np.inf, np.nan) for run in runs}
        return pd.concat(known or {0: pd.Series(dtype=float)}, names=["seed", "client"])

    found = (last(protocol.members[0]) - last(baseline)).dropna()
    if found.empty:
        return []
    share = units.is_share(metric)
    factor = units.direction(metric) * (100 if share else 1)
    clients = (factor * found).groupby("client")
    ends = {"low": clients.min(), "high": clients.max()} if clients.size().max() > 1 else {}
    table = pd.DataFrame({"difference": clients.mean(), **ends}).reset_index()
    table["series"] = (table["difference"] >= 0).map({True: AHEAD, False: BEHIND})
    label = f"difference in {'percentage points' if share else readable(metric)}"
    y, by = Axis("difference", label, zero=True), Series.of("series", (AHEAD, BEHIND), OURS)
    chart = marks.points(table, Axis("client"), y, by, title=label.capitalize())
    caption = (
        "Each client's model on its own test samples at the last evaluation, in runs with the same "
        "seed. A point is the mean over the seeds, a line their range."
    )
    title = f"{OURS} against {baseline.label}, the best baseline, by client"
    return figures_of("differences", protocol.name, title, [chart], caption, protocol.groups)


def _costs(protocol: Protocol, asked: float | None) -> list[Figure]:
    """Bytes and FLOPs to the target, a bar per method that reached it."""
    target = protocol.target(asked)
    rows = [(m.label, *costs_to(target, m.group.runs, protocol.column)) for m in protocol.members]
    every = pd.DataFrame(rows, columns=pd.Index(["method", "rounds", "bytes", "flops"]))
    table = every.dropna(subset="rounds")
    if table.empty:
        return []
    places = {method.label: method.group.place for method in protocol.members}
    charts = []
    for column, label, unit in (("bytes", "bytes up and down", "B"), ("flops", "work", "FLOPs")):
        factor, scaled = units.unit_of(float(table[column].max()), unit)
        x = Axis(column, f"{label} of all clients ({scaled})", zero=True)
        y = Axis("method", names=tuple(table["method"]))
        shown = table[["method"]].assign(**{column: table[column] / factor})
        charts.append(marks.bars(shown, x, y, Series("method", places)))
    missing = ", ".join(every["method"][every["rounds"].isna()])
    caption = (
        "Until the mean over the clients first reached the target in an evaluation; mean over the "
        f"seeds.{f' Not reached: {missing}.' if missing else ''}"
    )
    title = f"costs to {protocol.goal(asked)}"
    return figures_of("costs", protocol.name, title, charts, caption, protocol.groups)


def _robustness(compared: Sequence[Protocol], factor: str) -> list[Figure]:
    """A figure for protocols that differ only in a factor, if a method has two values of it."""
    having = [one for one in compared if factor in one.options]
    rest = [{name: text for name, text in one.options.items() if name != factor} for one in having]
    names = conditions([one.groups[0].data for one in having], rest)
    found: list[Figure] = []
    for name, pairs in gathered(zip(names, having, strict=True), lambda pair: pair[0]).items():
        column, members = pairs[0][1].column, [(one, m) for _, one in pairs for m in one.members]
        scores = pd.DataFrame(
            score_row(m.group, column, series=m.name, at=float(one.options[factor]))
            for one, m in members
        )
        table = scores.dropna(subset="value").sort_values("at", kind="stable")
        if table.empty or table["series"].value_counts().max() < 2:
            continue
        by = Series("series", {m.name: m.group.method_place for _, m in members}, "method")
        axes = Axis("at", FACTORS[factor]), metric_axis_of(column, table)
        title = f"Final {readable(column)}, mean over clients"
        drawn = stacked([table], column)
        chart = marks.points(drawn, *axes, by, connected=True, title=title)
        title = f"{readable(base_name(column))} by {FACTORS[factor]}"
        caption = "Along a line only the x-axis differs; bars are 95 % t intervals over seeds."
        groups = [method.group for _, method in members]
        kind = f"robustness-{factor.split()[-1]}"
        found += figures_of(kind, name, title, [chart], caption, groups)
    return found


def gates_figure(run: Run) -> Figure | None:
    """The weight of the private expert by client and class, and its mean over a client's classes.

    None for a run without gates. At most 40 clients and classes are drawn, evenly spaced.
    """
    if run.gates is None or not np.isfinite(run.gates.personal).any():
        return None
    number = run.gates.personal.shape[1]
    known = list(run.partition.counts.columns) if run.partition else []
    names = known if len(known) == number else [str(place) for place in range(number)]
    weights = pd.DataFrame(run.gates.personal, columns=pd.Index(names)).dropna(how="all")
    weights = weights.iloc[marks.evenly_spaced(len(weights), most=MOST_SHOWN)]
    means = pd.DataFrame(
        {
            "mean": weights.mean(axis=1),
            "client group": run.evaluation["group"].reindex(weights.index, fill_value=EVERYONE),
        }
    )
    for table in (weights, means):
        table.index = table.index.astype(str).rename("client")
    classes = weights.columns[marks.evenly_spaced(number, most=MOST_SHOWN)]
    clients = Axis("client", names=tuple(weights.index))
    shade = Axis("weight", "0: shared expert, 1: private expert", ends=(0.0, 1.0), format=".2f")
    heat = marks.heat(
        weights[classes].reset_index().melt("client", var_name="class", value_name="weight"),
        Axis("class", names=tuple(classes)),
        clients,
        shade,
        colours="diverging",
        middle=0.5,
        title="By class",
    )
    x = Axis("mean", "weight of the private expert", ends=(0.0, 1.0), format=".2f")
    by = Series.of("client group", run.client_groups or (EVERYONE,), "client group")
    title = "Mean over the classes of a client"
    side = marks.bars(means.reset_index(), x, clients, by, title=title)
    caption = (
        "Blue: samples of that class go through the client's private expert; brown: through the "
        f"shared one. Blank: no test samples. At most {MOST_SHOWN} clients are drawn."
    )
    title = f"Weight of the private expert after round {run.gates.round}{run.note}"
    return Figure("gates", title, (heat, side), caption)
