"""The methods of a protocol as a table: final metric, gains, and what a target cost."""

import math
from collections.abc import Sequence

from pandas import DataFrame
from rich.console import Console

from lightfed.drawing.markup import parts
from lightfed.drawing.summary import print_line, print_table
from lightfed.results.intervals import CHOSEN, INTERVAL, goal_text, resolution_text
from lightfed.results.tables import readable, text_table
from lightfed.results.units import NOTHING, bytes_text, flops_text, is_share, spread_text
from lightfed.studies.pfedmoe.methods import Method, Protocol


def method_table(protocol: Protocol, asked: float | None) -> DataFrame:
    """A row per method, a star before the best; for `asked` see `Protocol.target`."""
    target = protocol.target(asked)
    return text_table([_row(protocol, method, target) for method in protocol.members])


def notes(protocol: Protocol, asked: float | None) -> list[str]:
    """How to read the table."""
    points = "percentage points" if is_share(protocol.metric) else "the metric's own unit"
    source = "what all methods reached in every seed" if asked is None else "as asked"
    return [
        f"Final {readable(protocol.metric)}: each client's model on its own test samples, mean "
        "over the clients with the sample deviation over seeds; the best has a star. Gains in "
        f"{points}, seed by seed; in brackets their {INTERVAL}, which needs two seeds. {CHOSEN}",
        "Kinds as in section 2.1 of the paper of pFedMoE. Rounds, bytes (up and down) and FLOPs of "
        f"all clients until the target, {source}, was first measured: mean over the seeds, a dash "
        "unless all reached it.",
    ]


def verdict(protocol: Protocol) -> str:
    """Sentences with pFedMoE's gains over the best baselines."""
    ours = protocol.ours
    best = protocol.best_other(ours)
    if best is None:
        return f"{ours.label}: no baseline was measured."
    gain = protocol.gain(ours, best)
    first = gain.sentence(ours.label, best.label, role="the best baseline")
    text = f"{ours.label}, final personal {readable(protocol.metric)}: {first}"
    alike = protocol.best_other(ours, kind=ours.kind)
    if alike is None:
        return f"{text}; no other of its kind ({ours.kind})."
    gain = protocol.gain(ours, alike)
    role = f"the best of its kind ({ours.kind})"
    return f"{text}; {gain.sentence(ours.label, alike.label, role=role)}."


def markup(protocol: Protocol, asked: float | None) -> list[str]:
    """For the page of a comparison."""
    part = parts()
    return [
        part.heading(f"{protocol.name}: methods{protocol.note}"),
        part.paragraph(verdict(protocol), "lead"),
        part.table(method_table(protocol, asked)),
        *(part.paragraph(text, "small") for text in notes(protocol, asked)),
    ]


def print_methods(console: Console, protocols: Sequence[Protocol], asked: float | None) -> None:
    """All tables, and the notes once."""
    for protocol in protocols:
        print_line(console, f"{protocol.name}{protocol.note}")
        content = method_table(protocol, asked)
        print_table(console, content, left=(0, 1), spare=("kind", content.columns[5]))
        print_line(console, verdict(protocol))
    for text in notes(protocols[0], asked) if protocols else ():
        print_line(console, text)


def _row(protocol: Protocol, method: Method, target: float) -> dict[str, str]:
    metric = protocol.metric
    cost = method.cost(metric, target)
    alike = protocol.best_other(method, kind=method.kind) if method.kind else None
    score = "*" * protocol.is_best(method) + spread_text(metric, *method.score(metric))
    resolution = resolution_text(protocol.runs, protocol.column)
    rounds = f"rounds to {goal_text(protocol.column, target)}, resolution {resolution}"
    return {
        "method": method.label,
        "kind": method.kind or NOTHING,
        f"personal {readable(metric)}": score,
        "over the best other": _gain_text(protocol, method, protocol.best_other(method)),
        "over the best of its kind": _gain_text(protocol, method, alike),
        rounds: NOTHING if math.isnan(cost.rounds) else f"{cost.rounds:.3g}",
        "bytes until then": bytes_text(cost.bytes),
        "FLOPs until then": flops_text(cost.flops),
    }


def _gain_text(protocol: Protocol, method: Method, other: Method | None) -> str:
    if other is None or not (gain := protocol.gain(method, other)).seeds:
        return NOTHING
    return f"{gain.gain} ({gain.interval})" if gain.interval else gain.gain
