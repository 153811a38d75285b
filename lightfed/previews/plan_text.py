"""A plan as text."""

import math
from collections.abc import Sequence

import numpy as np

from lightfed.previews.plan import Plan

_TABLE = 16  # ranks, of more there is a summary
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def plan_text(plan: Plan) -> str:
    """A page for a terminal."""
    rounds = "the first round" if plan.rounds == 1 else f"a mean of the first {plan.rounds} rounds"
    head = (
        f"{plan.algorithm}, {_count(plan.clients)} clients on {_count(plan.world)} ranks: "
        f"{rounds}, {_count(plan.participants)} sessions in each"
    )
    parts = [[head], _cohorts(plan), _ranks(plan), _balance(plan), _traffic(plan), _memory(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _cohorts(plan: Plan) -> list[str]:
    lines = [("cohort", "clients", "parameters", "FLOPs a sample", "a row")]
    lines += [
        (
            cohort.name,
            _count(cohort.clients),
            _count(cohort.parameters),
            _scaled(cohort.flops) if cohort.flops else "not known",
            _bytes(cohort.row),
        )
        for cohort in plan.cohorts
    ]
    return _aligned(lines)


def _ranks(plan: Plan) -> list[str]:
    """A line for every rank, or of many the least, the median and the most."""
    cost = "seconds" if plan.timed else "samples x FLOPs"
    lines: list[tuple[str, ...]] = [("rank", "sessions", cost, "rows")]
    columns = np.stack([plan.sessions, plan.loads, plan.memory.rows])
    names, rows = [str(rank) for rank in range(plan.world)], columns.T.tolist()
    if plan.world > _TABLE:  # each column by itself: not the same rank's
        names, rows = ["least", "median", "most"], np.quantile(columns, [0, 0.5, 1], 1).tolist()
    for name, (sessions, load, memory) in zip(names, rows, strict=True):
        lines.append((name, _count(sessions), _scaled(load), _bytes(memory)))
    return _aligned(lines)


def _balance(plan: Plan) -> list[str]:
    balance = plan.balance
    lines = [
        f"balance  {balance.planned:.3f}: the busiest rank over the least that is possible, which",
        "         is the mean of the ranks, or the longest session",
    ]
    if plan.participants < plan.clients:
        homes, anew = balance.other, balance.planned
        why = "clients keep nothing, so that whoever trains is placed anew"
        if plan.stateful:
            homes, anew, why = anew, homes, "clients keep rows, and so have home ranks"
        lines += [
            f"         with home ranks {homes:.3f}, with ranks for whoever trains {anew:.3f}",
            f"         {why}",
        ]
    return lines


def _traffic(plan: Plan) -> list[str]:
    traffic = plan.traffic
    most = "at most " if traffic.at_most else ""
    up = "not known" if traffic.depends else most + _bytes(traffic.up)
    lines = [f"bytes    a round: down {most}{_bytes(traffic.down)}, up {up}"]
    if traffic.servers:
        lines[0] += f", between servers {_bytes(traffic.servers)}"
    if traffic.at_most:
        lines.append("         masks save a part that is not known without training")
    if traffic.depends:
        lines.append("         what is sent depends on training; down is what is known without it")
    return lines


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    where = ", in host memory" if memory.on_host else ""
    parts = {
        f"rows of its clients{where}": float(memory.rows.max()),
        "two rows of every cohort on the device": memory.staged,
        "live modules, one a cohort": memory.modules,
        "server models": memory.server,
        "gradients and optimiser state": memory.training,
        "rows of other ranks, at most": memory.exchange,
    }
    lines = [f"memory   of the fullest rank's device: {_bytes(memory.device)}"]
    lines += [f"         {_bytes(size):>8}  {what}" for what, size in parts.items() if size]
    lines.append("         without activations, the data set, and what a merge needs for a moment")
    return lines


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, all but the first to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            f"{text:>{width}}" if i else f"{text:<{width}}"
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def _count(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _bytes(value: float) -> str:
    return f"{_scaled(value)}B" if value >= 1000 else f"{value:.0f} B"


def _scaled(value: float) -> str:
    """Three digits and a prefix, or a space in its place."""
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{_three_digits(value / size)} {prefix}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    if not value:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
