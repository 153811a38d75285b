"""The tables of a run as text, made once for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightfed.results.columns import base_name
from lightfed.results.outcome import primary_metric, worst_tenth
from lightfed.results.run import Run
from lightfed.results.units import NOTHING, bytes_text, count_text, flops_text, metric_text

if TYPE_CHECKING:
    from pandas import DataFrame


def text_table(rows: Sequence[Mapping[str, str]]) -> DataFrame:
    """Cells of text; the first column is the name of the row, the others are numbers."""
    import pandas as pd

    return pd.DataFrame(rows, dtype="str")


def without_empty_columns(table: DataFrame) -> DataFrame:
    """The table without columns in which nothing was measured; the first one stays."""
    kept = [name for i, name in enumerate(table) if i == 0 or (table[name] != NOTHING).any()]
    return table[kept]


def headline(run: Run) -> str:
    """One line: `HeteroFL on Digits, 20 clients in 5 groups, 30 rounds, seed 0, 4 ranks`."""
    stated, clients = run.environment, run.num_clients or 0
    tested, groups = stated.get("evaluated_clients") or clients, len(run.client_groups)
    parts = (
        f"{run.algorithm} on {run.data}{run.note}",
        counted(clients, "client") + f" in {groups} groups" * (groups > 1),
        f"personal metrics of {tested:,} of {clients:,} clients" * (tested < clients),
        f"{rounds_text(run)} round{'s' * (run.last_round != 1)}",
        f"seed {run.seed}",
        counted(stated.get("ranks", 1), "rank"),
        f"{failures_text(run)} sessions left out" * (failures_text(run) != NOTHING),
        "other settings in some rounds" * bool(stated.get("reconfigured")),
    )
    return ", ".join(filter(None, parts))


def measured(run: Run) -> str:
    """A sentence that says which model `personal` metrics are of; empty if there are none."""
    holds = str(run.environment.get("personal") or "what a client holds")
    moments = {"aggregated": ", after aggregation", "trained": ", as its session left it"}
    when = moments.get(str(run.environment.get("evaluate_at")), "")
    text = f"Personal: {holds}{when}, on the client's own test samples."
    return text if run.has(f"personal/{base_name(primary_metric(run))}") else ""


def rounds_text(run: Run) -> str:
    """`60`, or `38 of 60` for an unfinished run."""
    of = "" if run.finished else f" of {run.planned or 'any number of'}"
    return f"{run.last_round}{of}"


def failures_text(run: Run) -> str:
    """`3 of 60`: sessions that are in no merge; a dash without any."""
    out, all_ = (run.series(name).sum() for name in ("excluded", "participants"))
    return f"{count_text(out)} of {count_text(all_)}" if out else NOTHING


def client_group_table(run: Run) -> DataFrame:
    """One row per client group: metrics of its clients' models and, if different, the global model.

    Metrics, and bytes kept, are of the clients that were tested. Bytes sent and FLOPs are means
    over all clients of the group, counted from the start of the run.
    """
    metric = base_name(primary_metric(run))
    columns = ["group", metric, f"local/{metric}", "stored_bytes"]
    tested = dict(iter(run.evaluation.reindex(columns=columns).groupby("group")))
    rows = []
    for name in filter(tested.__contains__, run.client_groups):
        _, scores, shared, kept = (tested[name][column] for column in columns)
        size = run.group_sizes.get(name, len(scores))
        up, down, flops = (cost / size for cost in run.costs.get(name, (math.nan,) * 3))
        row = {
            "group": name,
            "clients": f"{len(scores):,} of " * (len(scores) < size) + f"{size:,}",
            readable(metric): metric_text(metric, scores.mean()),
            "std over clients": metric_text(metric, scores.std(ddof=0)),
            "worst 10 %": metric_text(metric, worst_tenth(scores, metric)),
            "of the global model": metric_text(metric, shared.mean()),
            "up / client": bytes_text(up),
            "down / client": bytes_text(down),
            "compute / client": flops_text(flops),
            "stored / client": stored_text(kept.mean()),
        }
        rows.append(row)
    return without_empty_columns(text_table(rows))


def readable(name: str) -> str:
    """`personal/accuracy_worst10` -> `personal accuracy worst 10 %`."""
    return name.replace("_worst10", " worst 10 %").replace("/", " ").replace("_", " ")


def sentence(name: str) -> str:
    """The readable name with a capital, for titles; other letters are unchanged (`mIoU`)."""
    text = readable(name)
    return text[:1].upper() + text[1:]


def counted(number: int, word: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def stored_text(value: float) -> str:
    """Clients of most methods keep nothing; then there is nothing to show."""
    return bytes_text(value) if value else NOTHING
