"""Pictures of methods in one protocol: differences by client, costs to a target, robustness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Figure, Series
from lightfed.drawing.tidy import file_name, metric_axis_of, score_row, stacked
from lightfed.results.intervals import goal_text, resolution_text
from lightfed.results.settings import variants
from lightfed.results.tables import readable
from lightfed.results.units import is_share, unit_of
from lightfed.studies.pfedmoe.methods import OURS, Protocol

Terms = tuple[str, str, frozenset[tuple[str, str]]]  # data, factor, all other options
AHEAD, BEHIND = "ahead", "behind"
FACTORS = {
    "partition per_client": "classes of a client",
    "partition alpha": "gamma, the concentration of classes",
}


def differences_figure(protocol: Protocol) -> Figure | None:
    """The mean over the seeds for each client, with its range; None without both methods."""
    found = protocol.differences()
    baseline = protocol.best_other(protocol.ours)
    if found.empty or baseline is None:
        return None
    scale = 100.0 if is_share(protocol.metric) else 1.0
    clients = (scale * found).groupby("client")
    ends = {"low": clients.min(), "high": clients.max()} if clients.size().max() > 1 else {}
    table = pd.DataFrame({"difference": clients.mean(), **ends}).reset_index()
    table["series"] = (table["difference"] >= 0).map({True: AHEAD, False: BEHIND})
    unit = "percentage points" if is_share(protocol.metric) else readable(protocol.metric)
    y = Axis("difference", f"difference in {unit}", zero=True)
    by = Series.of("series", (AHEAD, BEHIND), OURS)
    title = f"{OURS} against {baseline.name}, the best baseline, by client"
    chart = marks.points(table, Axis("client"), y, by, title=f"Difference in {unit}")
    caption = (
        "Each client's model on its own test samples at the last evaluation. Differences are "
        "between two runs with the same seed, whose clients have the same data; a point is their "
        "mean, and a line reaches from the lowest to the highest."
    )
    name = f"{protocol.name}: {title}{protocol.note}"
    return Figure(file_name("differences", protocol.name), name, (chart,), caption)


def costs_figure(protocol: Protocol, asked: float | None) -> Figure | None:
    """Bytes and FLOPs to the target, a bar per method; None if no method reached it."""
    target = protocol.target(asked)
    costs = {m.label: m.cost(protocol.metric, target) for m in protocol.members}
    reached = {name: cost for name, cost in costs.items() if not math.isnan(cost.rounds)}
    if not reached:
        return None
    table = pd.DataFrame(
        {"method": name, "bytes": cost.bytes, "flops": cost.flops} for name, cost in reached.items()
    )
    by = Series("method", {method.label: method.place for method in protocol.members})
    charts = []
    for column, label, unit in (("bytes", "bytes up and down", "B"), ("flops", "work", "FLOPs")):
        factor, scaled = unit_of(float(table[column].max()), unit)
        x = Axis(column, f"{label} of all clients ({scaled})", zero=True)
        own = table.assign(**{column: table[column] / factor})
        charts.append(marks.bars(own, x, Axis("method", names=tuple(reached)), by))
    missing = [name for name in costs if name not in reached]
    caption = (
        "Until the mean over the clients first reached the target in an evaluation; mean over the "
        f"seeds.{f' Not reached: {chr(44).join(missing)}.' if missing else ''}"
    )
    goal = goal_text(protocol.column, target)
    resolution = resolution_text(protocol.runs, protocol.column)
    title = f"{protocol.name}: costs to {goal}, resolution {resolution}{protocol.note}"
    return Figure(file_name("costs", protocol.name), title, tuple(charts), caption)


@dataclass(frozen=True)
class Robustness:
    """Protocols by the value of the only option in which they differ, ascending.

    `variant` has other options in which they differ from most protocols with that data.
    """

    data: str
    variant: str
    factor: str
    protocols: dict[float, Protocol]

    @property
    def metric(self) -> str:
        return next(iter(self.protocols.values())).metric

    @property
    def name(self) -> str:
        data = f"{self.data}; {self.variant}" if self.variant else self.data
        return f"{data}: {readable(self.metric)} by {FACTORS[self.factor]}"


def robustness(protocols: Sequence[Protocol]) -> list[Robustness]:
    """The studies over classes per client and over gamma."""
    members: dict[Terms, tuple[dict[str, str], dict[float, Protocol]]] = {}
    for protocol in protocols:
        options = protocol.members[0].options
        for factor in FACTORS:
            if (value := _number(options.get(factor))) is not None:
                rest = {name: text for name, text in options.items() if name != factor}
                terms = (protocol.data, factor, frozenset(rest.items()))
                members.setdefault(terms, (rest, {}))[1][value] = protocol
    found = {terms: own for terms, own in members.items() if len(own[1]) > 1}
    names = variants([rest for rest, _ in found.values()], [data for data, *_ in found])
    return [
        Robustness(data, variant, factor, dict(sorted(own.items())))
        for ((data, factor, _), (_, own)), variant in zip(found.items(), names, strict=True)
    ]


def robustness_figure(found: Robustness) -> Figure | None:
    """A line per method over the values of the option; None unless a method has two."""
    column = f"personal/{found.metric}"
    table = pd.DataFrame(
        score_row(method.group, column, series=method.name, at=value)
        for value, protocol in found.protocols.items()
        for method in protocol.members
    ).dropna(subset="value")
    if table.empty or table["series"].value_counts().max() < 2:
        return None
    x = Axis("at", FACTORS[found.factor])
    y = metric_axis_of(column, table)
    members = [method for protocol in found.protocols.values() for method in protocol.members]
    by = Series("series", {m.name: m.group.method_place for m in members}, "method")
    chart = marks.points(
        stacked([table], found.metric), x, y, by, connected=True,
        title=f"Final {readable(column)}, mean over clients",
    )  # fmt: skip
    note = next(iter(found.protocols.values())).note
    caption = "Along a line only the x-axis differs; bars are 95 % t intervals over seeds."
    return Figure(file_name("robustness", found.name), found.name + note, (chart,), caption)


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
