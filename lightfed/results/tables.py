"""The tables of a run as text, made once for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightfed.results.columns import OF_CLIENTS, base_name
from lightfed.results.outcome import best, client_metric, primary_metric, totals, worst_tenth
from lightfed.results.run import Run
from lightfed.results.units import (
    NOTHING,
    bytes_text,
    count_text,
    flops_text,
    metric_text,
    seconds_text,
)
from lightfed.utils.keys import COLUMNS

if TYPE_CHECKING:
    from pandas import DataFrame

TEXTS = {"B": bytes_text, "FLOPs": flops_text, "s": seconds_text, "": count_text}  # by unit
SPENT = {"up / client": bytes_text, "down / client": bytes_text, "compute / client": flops_text}


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
        f"{run.algorithm} on {run.data}",
        _counted(clients, "client") + f" in {groups} groups" * (groups > 1),
        f"personal metrics of {tested:,} of {clients:,} clients" * (tested < clients),
        f"{rounds_text(run)} round{'s' * (run.last_round != 1)}",
        f"seed {run.seed}",
        _counted(stated.get("ranks", 1), "rank"),
        "other settings in some rounds" * bool(stated.get("reconfigured")),
    )
    return ", ".join(filter(None, parts))


def measured(run: Run) -> str:
    """A sentence that says which model `personal` metrics are of; empty if there are none."""
    text = f"Personal: {run.holds}, on the client's own test samples."
    return text if run.has(f"personal/{base_name(primary_metric(run))}") else ""


def key_figures(run: Run) -> DataFrame:
    """The final values that were measured: `figure`, `final`, and a `note` that may be empty."""
    primary, total = primary_metric(run), totals(run)
    metric, (most, best_round) = base_name(primary), best(run, primary)
    losses = run.series("train_loss").dropna()
    loss_round = int(losses.index.max()) if len(losses) else 0
    held = run.evaluation.reindex(columns=[metric])[metric]
    deviations = {kind: run.final(f"{kind}/{metric}_std") for kind in OF_CLIENTS}
    deviations["personal"] = float(held.std(ddof=0))  # a run logs none of perplexities

    def of_metric(kind: str, label: str, note: str) -> tuple[str, str, str]:
        std = deviations.get(kind, math.nan)
        spread = "" if math.isnan(std) else f"std over clients {metric_text(metric, std)}"
        if best_round and primary.startswith(f"{kind}/"):
            note = f"best {metric_text(metric, most)} in round {best_round}"
        value = metric_text(metric, run.final(f"{kind}/{metric}"))
        return f"{label} {readable(metric)}", value, "; ".join(filter(None, (note, spread)))

    def of_cost(label: str, name: str, text: Callable[[float], str]) -> tuple[str, str, str]:
        each = text(total[name] / (run.num_clients or math.nan))
        return label, text(total[name]), f"{each} per client"

    figures = (
        ("rounds", rounds_text(run), ""),
        ("sessions left out", failures_text(run), "failed, or their updates not finite"),
        of_metric("global", "global", ""),
        of_metric("personal", "personal", "mean over clients"),
        (
            f"worst 10 % {readable(metric)}",
            metric_text(metric, worst_tenth(held, metric)),
            "mean of that tenth",
        ),
        *(of_metric(kind, label, note) for kind, (label, note) in OF_CLIENTS.items()),
        (
            "train loss",
            metric_text("loss", run.series("train_loss").get(loss_round, math.nan)),
            f"of round {loss_round}" if loss_round != run.last_round else "",
        ),
        of_cost("sent up", "bytes_up", bytes_text),
        of_cost("sent down", "bytes_down", bytes_text),
        ("between servers", bytes_text(total["server_bytes"]), "in addition to what clients send"),
        of_cost("compute", "flops", flops_text),
        ("stored / client", _stored(total["stored_bytes"]), "mean over clients"),
        ("virtual time", seconds_text(run.final("virtual_time")), "of the devices"),
        (
            "time per round",
            seconds_text(total["per_round"]),
            f"{seconds_text(total['seconds'])} in all",
        ),
    )
    head = ("figure", "final", "note")
    return text_table([dict(zip(head, f, strict=True)) for f in figures if f[1] != NOTHING])


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
    over all clients of the group, counted from the start of the run, as those of `key_figures`;
    they are left out if a later round has added to them.
    """
    metric = client_metric(run, base_name(primary_metric(run))) or "metric"
    at, sums = run.costs or (0, ())
    sizes = run.group_sizes
    spent = dict(zip(sizes, sums, strict=True)) if at == run.last_round else {}
    columns = [metric, f"local/{metric}", "stored_bytes"]
    tested = dict(iter(run.evaluation.reindex(columns=["group", *columns]).groupby("group")))
    rows = []
    for name in filter(tested.__contains__, run.client_groups):
        scores, shared, kept = (tested[name][column] for column in columns)
        clients = sizes.get(name, len(scores))
        costs = spent.get(name, (math.nan,) * len(SPENT))
        rows.append(
            {
                "group": name,
                "clients": f"{len(scores)} of {clients} tested"
                if len(scores) < clients
                else f"{clients:,}",
                readable(metric): metric_text(metric, float(scores.mean())),
                "std over clients": metric_text(metric, float(scores.std(ddof=0))),
                "worst 10 %": metric_text(metric, worst_tenth(scores, metric)),
                "of the global model": metric_text(metric, float(shared.mean())),
                **{
                    head: text(cost / clients)
                    for (head, text), cost in zip(SPENT.items(), costs, strict=True)
                },
                "stored / client": _stored(float(kept.mean())),
            }
        )
    return without_empty_columns(text_table(rows))


def rounds_table(run: Run, newest: int) -> DataFrame:
    """The last `newest` rounds, latest first, without learning rates and means of groups.

    A column a round: there may be thirty metrics.
    """
    picked = run.rounds.iloc[: -newest - 1 : -1]
    texts = {
        readable(name): [_cell(name, x) for x in picked[name]]
        for name in picked.columns.astype(str)
        if name not in run.client_group_columns and not name.startswith("lr-")
    }
    table = text_table([]).assign(round=picked.index.astype("str"), **texts)
    return without_empty_columns(table).set_index("round").T.reset_index(names="round")


def readable(name: str) -> str:
    """`personal/accuracy_worst10` -> `personal accuracy worst 10 %`."""
    return name.replace("_worst10", " worst 10 %").replace("/", " ").replace("_", " ")


def sentence(name: str) -> str:
    """The readable name with a capital, for titles; other letters are unchanged (`mIoU`)."""
    text = readable(name)
    return text[:1].upper() + text[1:]


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"


def _cell(column: str, value: float) -> str:
    if column not in COLUMNS:
        return metric_text(column, value)
    return TEXTS[COLUMNS[column].unit](value)


def _stored(value: float) -> str:
    """Clients of most methods keep nothing; then there is nothing to show."""
    return bytes_text(value) if value else NOTHING
