"""pFedMoE and its rivals: gains, differences by client, costs, robustness, and a run's gates.

Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous
Personalized Federated Learning", 2024, arXiv:2402.01350. Methods are compared in one protocol: the
same data, partition, models and work, with a learning rate for each method.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Figure, Series
from lightfed.drawing.tidy import file_name, metric_axis_of, score_row, stacked
from lightfed.results import units
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
from lightfed.results.settings import gathered, options, told_apart, variants
from lightfed.results.tables import readable, text_table

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
COMMON = re.compile(rf"(?!{FREE.pattern})|model\.algorithm\.init_args\.(gate|federate)$")
# arguments of pFedMoE that the paper does not have: a run with another value is an ablation
PARTS = {"gate": "paper", "federate": "true"}
FACTORS = {
    "partition per_client": "classes of a client",
    "partition alpha": "gamma, the concentration of classes",
}
AHEAD, BEHIND = "ahead", "behind"
MOST_SHOWN = 40  # rows, and classes, of the gates


@dataclass(frozen=True, eq=False)
class Method:
    """One experiment, with the paper's name and kind; an ablation has no kind.

    The label says in what it differs if a protocol has two of one method. `options` are those of
    the protocol.
    """

    group: Group
    name: str
    kind: str
    label: str
    options: dict[str, str]


@dataclass(frozen=True)
class Protocol:
    """pFedMoE and at least one other method under the same conditions, in the order of METHODS.

    Its name has the options in which it differs from most others on its data.
    """

    name: str
    metric: str
    members: tuple[Method, ...]

    @property
    def column(self) -> str:
        return f"personal/{self.metric}"

    @property
    def runs(self) -> list[Run]:
        return runs_of(method.group for method in self.members)

    @property
    def title(self) -> str:
        return self.name + synthetic_note(method.group for method in self.members)

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
        return reached_by_all(self.runs, self.column) if asked is None else asked

    def differences(self) -> pd.Series[float]:
        """By `seed` and `client`: how much pFedMoE's last evaluation beats the best baseline's.

        Clients of different seeds have different data. Empty if clients were not evaluated.
        """

        def last(method: Method) -> pd.Series[float]:
            runs = [run for run in method.group.runs if self.metric in run.client_metrics]
            known = {run.seed: run.evaluation[self.metric].replace(np.inf, np.nan) for run in runs}
            return pd.concat(known or {0: pd.Series(dtype=float)}, names=["seed", "client"])

        ours = self.members[0]
        difference = last(ours) - last(self.best(but=OURS) or ours)
        return units.direction(self.metric) * difference.dropna()


def protocols(runs: Sequence[Run]) -> list[Protocol]:
    """The protocols in these runs."""
    methods = [_method(g) for g in grouped(runs) if g.algorithm in METHODS and g.runs[0].config]
    every = gathered(methods, lambda m: (m.group.data, frozenset(m.options.items()))).values()
    met = [own for own in every if OURS in (names := {m.name for m in own}) and len(names) > 1]
    variant = variants([own[0].options for own in met], [own[0].group.data for own in met])
    return [
        Protocol(
            "; ".join(filter(None, (own[0].group.data, text))),
            usual_metric(method.group for method in own),
            tuple(_labelled(own)),
        )
        for own, text in zip(met, variant, strict=True)
    ]


def method_table(protocol: Protocol, asked: float | None = None) -> pd.DataFrame:
    """A row of text per method, a star before the best; for `asked` see `Protocol.target`."""
    target = protocol.target(asked)
    goal = f"{goal_text(protocol.column, target)}, resolution "
    goal += resolution_text(protocol.runs, protocol.column)
    rows = []
    for method in protocol.members:
        alike = protocol.best(method.kind, but=method.name) if method.kind else None
        rounds, sent, flops = costs_to(target, method.group.runs, protocol.column)
        star = "*" * (method is protocol.best())
        rows.append(
            {
                "method": method.label,
                "kind": method.kind or units.NOTHING,
                readable(protocol.column): star + final_text(method.group, protocol.column),
                "over the best other": protocol.gain_text(method, protocol.best(but=method.name)),
                "over the best of its kind": protocol.gain_text(method, alike),
                f"rounds to {goal}": units.NOTHING if math.isnan(rounds) else f"{rounds:.3g}",
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
    drawn = [draw for one in compared for draw in (_differences(one), _costs(one, target))]
    return [figure for figure in (*drawn, *_robustness(compared)) if figure is not None]


def _method(group: Group) -> Method:
    name, kind = METHODS[group.algorithm]
    own = options(group.runs[0].settings, but=FREE)
    return Method(group, name, "" if _changed(group) else kind, name, own)


def _changed(group: Group) -> dict[str, str]:
    """The parts of pFedMoE that an ablation changes."""
    settings = group.runs[0].settings
    stated = {key: settings.get(f"model.algorithm.init_args.{key}", PARTS[key]) for key in PARTS}
    return {key: text for key, text in stated.items() if text != PARTS[key]}


def _labelled(methods: Sequence[Method]) -> list[Method]:
    """In the order of METHODS, pFedMoE before its ablations, with labels that differ."""
    order = [name for name, _ in METHODS.values()]
    methods = sorted(methods, key=lambda m: (order.index(m.name), bool(_changed(m.group))))
    terms = []
    for m in methods:
        changes = [f"{key} {text}" for key, text in _changed(m.group).items()]
        settings = options(m.group.runs[0].settings, but=COMMON)
        terms.append({"method": ", ".join([m.name, *changes])} | settings)
    labels = told_apart(terms)
    times = Counter(labels)
    return [
        replace(m, label=f"{text} ({m.group.name})" if times[text] > 1 else text)
        for m, text in zip(methods, labels, strict=True)
    ]


def _differences(protocol: Protocol) -> Figure | None:
    """The mean over the seeds for each client, with its range."""
    found, baseline = protocol.differences(), protocol.best(but=OURS)
    if found.empty or baseline is None:
        return None
    share = units.is_share(protocol.metric)
    clients = ((100.0 if share else 1.0) * found).groupby("client")
    ends = {"low": clients.min(), "high": clients.max()} if clients.size().max() > 1 else {}
    table = pd.DataFrame({"difference": clients.mean(), **ends}).reset_index()
    table["series"] = (table["difference"] >= 0).map({True: AHEAD, False: BEHIND})
    label = f"difference in {'percentage points' if share else readable(protocol.metric)}"
    y, by = Axis("difference", label, zero=True), Series.of("series", (AHEAD, BEHIND), OURS)
    chart = marks.points(table, Axis("client"), y, by, title=label.capitalize())
    caption = (
        "Each client's model on its own test samples at the last evaluation. Differences are "
        "between two runs with the same seed, whose clients have the same data; a point is their "
        "mean, and a line reaches from the lowest to the highest."
    )
    title = f"{OURS} against {baseline.label}, the best baseline, by client"
    name = file_name("differences", protocol.name)
    return Figure(name, f"{protocol.title}: {title}", (chart,), caption)


def _costs(protocol: Protocol, asked: float | None) -> Figure | None:
    """Bytes and FLOPs to the target, a bar per method that reached it."""
    target = protocol.target(asked)
    rows = [(m.label, *costs_to(target, m.group.runs, protocol.column)) for m in protocol.members]
    every = pd.DataFrame(rows, columns=pd.Index(["method", "rounds", "bytes", "flops"]))
    table = every.dropna(subset="rounds")
    if table.empty:
        return None
    # a method keeps its colour; experiments of one method have their own
    times = Counter(method.name for method in protocol.members)
    places = {
        m.label: m.group.method_place if times[m.name] == 1 else m.group.place
        for m in protocol.members
    }
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
    goal = goal_text(protocol.column, target)
    goal += f", resolution {resolution_text(protocol.runs, protocol.column)}"
    name = file_name("costs", protocol.name)
    return Figure(name, f"{protocol.title}: costs to {goal}", tuple(charts), caption)


def _robustness(compared: Sequence[Protocol]) -> list[Figure | None]:
    """A figure for protocols that differ only in a factor."""
    members: dict[tuple[str, str, frozenset[tuple[str, str]]], dict[float, Protocol]] = {}
    for protocol in compared:
        first = protocol.members[0]
        for factor in FACTORS:
            value = pd.to_numeric(first.options.get(factor, ""), errors="coerce")
            rest = frozenset(item for item in first.options.items() if item[0] != factor)
            if not math.isnan(value):
                members.setdefault((first.group.data, factor, rest), {})[value] = protocol
    found = {key: own for key, own in members.items() if len(own) > 1}
    names = variants([dict(rest) for *_, rest in found], [data for data, *_ in found])
    return [
        _robustness_figure("; ".join(filter(None, (data, text))), factor, own)
        for ((data, factor, _), own), text in zip(found.items(), names, strict=True)
    ]


def _robustness_figure(data: str, factor: str, own: dict[float, Protocol]) -> Figure | None:
    """A line per method over the values of a factor; None unless a method has two."""
    first = own[min(own)]
    members = [(value, method) for value in sorted(own) for method in own[value].members]
    table = pd.DataFrame(
        score_row(method.group, first.column, series=method.name, at=value)
        for value, method in members
    ).dropna(subset="value")
    if table.empty or table["series"].value_counts().max() < 2:
        return None
    by = Series("series", {m.name: m.group.method_place for _, m in members}, "method")
    axes = Axis("at", FACTORS[factor]), metric_axis_of(first.column, table)
    title = f"Final {readable(first.column)}, mean over clients"
    drawn = stacked([table], first.metric)
    chart = marks.points(drawn, *axes, by, connected=True, title=title)
    caption = "Along a line only the x-axis differs; bars are 95 % t intervals over seeds."
    name = f"{data}: {readable(first.metric)} by {FACTORS[factor]}"
    note = synthetic_note(method.group for _, method in members)
    return Figure(file_name("robustness", name), name + note, (chart,), caption)


def gate_rows(run: Run) -> pd.DataFrame:
    """The mean weight of the private expert, a row per client or group of similar clients.

    The gates' weights of the two experts add up to 1. Up to 40 clients have a row each. More are
    combined within their client group by similar mean weight, the most personal first, about
    equally many in a row.

    Returns:
        Columns: `client group`, `mean` (over the classes of each client, then over the clients),
        and one for each class, NaN if no client of the row has test samples of it.
    """
    assert run.gates is not None
    number = run.gates.personal.shape[1]
    known = list(run.partition.counts.columns) if run.partition else []
    names = known if len(known) == number else [str(place) for place in range(number)]
    weights = pd.DataFrame(run.gates.personal, columns=pd.Index(names)).dropna(how="all")
    means = weights.mean(axis=1)
    groups = run.evaluation["group"].reindex(weights.index, fill_value="all clients")
    rows = weights.index.astype(str).to_series(index=weights.index)
    if many := len(weights) > MOST_SHOWN:
        rank = means.groupby(groups).rank(method="first", ascending=False) - 1
        size = groups.map(groups.value_counts())
        part = (rank * (MOST_SHOWN * size // len(weights)).clip(lower=1) // size).astype(int)
        clients = part.groupby([groups, part]).transform("size").astype(str)
        rows = groups + " " + (part + 1).astype(str) + " (" + clients + " clients)"
    table = weights.assign(mean=means).groupby(rows, sort=False).mean()
    table.insert(0, "client group", groups.groupby(rows, sort=False).first())
    order = ["client group", "mean"]
    return table.sort_values(order, ascending=[True, False]) if many else table


def gates_figure(run: Run) -> Figure | None:
    """Weights by client and class, and the mean of each client; None for a run without gates."""
    if run.gates is None or not np.isfinite(run.gates.personal).any():
        return None
    rows = gate_rows(run).rename_axis("client")
    classes = rows.columns.drop(["client group", "mean"])
    classes = classes[marks.evenly_spaced(len(classes), most=MOST_SHOWN)]
    clients = Axis("client", names=tuple(rows.index))
    shade = Axis("weight", "0: shared expert, 1: private expert", ends=(0.0, 1.0), format=".2f")
    heat = marks.heat(
        rows[classes].reset_index().melt("client", var_name="class", value_name="weight"),
        Axis("class", names=tuple(classes)),
        clients,
        shade,
        colours="diverging",
        middle=0.5,
        title="By class",
    )
    x = Axis("mean", "weight of the private expert", ends=(0.0, 1.0), format=".2f")
    by = Series.of("client group", run.client_groups or ("all clients",), "client group")
    title = "Mean over the classes of a client"
    side = marks.bars(rows.reset_index(), x, clients, by, title=title)
    caption = (
        "Blue: samples of that class go through the client's private expert. Brown: through the "
        "shared one. Grey: half and half. Blank: no test samples. With many clients a row "
        "combines clients of one group with similar means, the most personal first."
    )
    title = f"Weight of the private expert after round {run.gates.round}{run.note}"
    return Figure("gates", title, (heat, side), caption)
