"""The tables of a run as text, made once for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightfed.results.columns import OF_CLIENTS
from lightfed.results.outcome import Outcome
from lightfed.results.run import Run, whole_number
from lightfed.results.units import (
    NOTHING,
    bytes_text,
    count_text,
    flops_text,
    metric_text,
    seconds_text,
    spread_text,
)
from lightfed.utils.keys import COLUMNS

if TYPE_CHECKING:
    from pandas import DataFrame

TEXTS = {"B": bytes_text, "FLOPs": flops_text, "s": seconds_text, "": count_text}  # by unit


@dataclass(frozen=True)
class Figure:
    """A key figure: its name, its value, and an explanation (may be empty)."""

    label: str
    value: str
    note: str = ""


def text_table(rows: Sequence[Mapping[str, str]]) -> DataFrame:
    """Cells of text; the first column is the name of the row, the others are numbers."""
    import pandas as pd

    return pd.DataFrame(rows, dtype="str")


def without_empty_columns(table: DataFrame) -> DataFrame:
    """The table without columns in which nothing was measured; the first one stays."""
    kept = [name for i, name in enumerate(table) if i == 0 or (table[name] != NOTHING).any()]
    return table[kept]


def without_shared_columns(table: DataFrame, names: Sequence[str]) -> tuple[DataFrame, str]:
    """The table without those named columns that have one value, and a text of these values."""
    said = [name for name in table if name in names and table[name].nunique() == 1]
    return table.drop(columns=said), ", ".join(f"{name} {table[name].iloc[0]}" for name in said)


def _tested(run: Run) -> str | None:
    """How many clients were evaluated, if not all."""
    tested = whole_number(run.environment.get("evaluated_clients"))
    if not tested or run.num_clients is None or tested >= run.num_clients:
        return None
    return f"personal metrics of {count_text(tested)} of {count_text(run.num_clients)} clients"


def headline(run: Run) -> str:
    """One line: `HeteroFL on Digits, 20 clients in 5 groups, 30 rounds, seed 0, 4 ranks`."""
    names = [run.environment.get(key) for key in ("algorithm", "dataset")]
    seed, ranks = run.environment.get("seed"), whole_number(run.environment.get("ranks"))
    client_groups = f" in {len(run.client_groups)} groups" if len(run.client_groups) > 1 else ""
    parts = (
        " on ".join(str(name) for name in names if name),
        None if run.num_clients is None else _counted(run.num_clients, "client") + client_groups,
        _tested(run),
        f"{rounds_text(run)} round{'s' * (run.last_round != 1)}",
        None if seed is None else f"seed {seed}",
        None if ranks is None else _counted(ranks, "rank"),
        "other settings in some rounds" if run.environment.get("reconfigured") else None,
    )
    return ", ".join(part for part in parts if part)


def measured(outcome: Outcome) -> str:
    """A sentence that says which model `personal` metrics are of; empty if there are none."""
    text = f"Personal: {outcome.run.holds}, on the client's own test samples."
    return "" if math.isnan(outcome.personal) else text


def key_figures(outcome: Outcome) -> list[Figure]:
    """The final values that were measured."""
    metric, name = outcome.metric, readable(outcome.metric)
    spread = "mean over clients" if math.isnan(outcome.personal_std) else "mean +- std over clients"
    best = f"best {metric_text(metric, outcome.best)} in round {outcome.best_round}"
    best *= outcome.best_round > 0
    old_loss = outcome.train_loss_round != outcome.run.last_round
    per_client = _each(flops_text(outcome.per_client(outcome.flops)))
    in_all = f"{seconds_text(outcome.seconds)} in all"
    personal = spread_text(metric, outcome.personal, outcome.personal_std)
    own_best = {outcome.primary.partition("/")[0]: best}
    figures = (
        ("rounds", rounds_text(outcome.run), ""),
        ("sessions left out", failures_text(outcome.run), "failed, or their updates not finite"),
        (f"global {name}", metric_text(metric, outcome.overall), own_best.get("global", "")),
        (f"personal {name}", personal, own_best.get("personal", spread)),
        (f"worst 10 % {name}", metric_text(metric, outcome.worst10), "mean of that tenth"),
        *(
            (f"{OF_CLIENTS[kind][0]} {name}", spread_text(metric, *values), OF_CLIENTS[kind][1])
            for kind, values in outcome.of_clients.items()
        ),
        (
            "train loss",
            metric_text("loss", outcome.train_loss),
            f"of round {outcome.train_loss_round}" * old_loss,
        ),
        _cost("sent up", outcome, outcome.bytes_up),
        _cost("sent down", outcome, outcome.bytes_down),
        ("between servers", bytes_text(outcome.server_bytes), "in addition to what clients send"),
        ("compute", flops_text(outcome.flops), per_client),
        ("stored / client", _stored(outcome.stored_bytes), "mean over clients"),
        ("virtual time", seconds_text(outcome.run.final("virtual_time")), "of the devices"),
        ("time per round", seconds_text(outcome.seconds_per_round), in_all),
    )
    return [Figure(*figure) for figure in figures if figure[1] != NOTHING]


def rounds_text(run: Run) -> str:
    """`60`, or `38 of 60` for an unfinished run."""
    of = "" if run.finished else f" of {run.planned or 'any number of'}"
    return f"{run.last_round}{of}"


def failures_text(run: Run) -> str:
    """`3 of 60`: sessions that are in no merge; a dash without any."""
    out, all_ = (run.series(name).sum() for name in ("excluded", "participants"))
    return f"{count_text(out)} of {count_text(all_)}" if out else NOTHING


def client_group_table(outcome: Outcome) -> DataFrame:
    """One row per client group: metrics of its clients' models and, if different, the global model.

    Metrics, and bytes kept, are of the clients that were tested. Bytes sent and FLOPs are means
    over all clients of the group, counted from the start of the run, as those of `key_figures`.
    """
    metric = outcome.client_metric or ""
    rows = [
        {
            "group": str(name),
            "clients": _tested_of(own["tested"], own["clients"]),
            readable(metric) or "metric": metric_text(metric, own["mean"]),
            "std": metric_text(metric, own["std"]),
            "worst 10 %": metric_text(metric, own["worst10"]),
            "of the global model": metric_text(metric, own["local"]),
            "up / client": bytes_text(own["bytes_up"]),
            "down / client": bytes_text(own["bytes_down"]),
            "compute / client": flops_text(own["flops"]),
            "stored / client": _stored(own["stored_bytes"]),
        }
        for name, own in outcome.client_groups.to_dict("index").items()
    ]
    return without_empty_columns(text_table(rows))


def rounds_table(run: Run, newest: int) -> DataFrame:
    """The last `newest` rounds, latest first, without learning rates and means of groups."""
    picked = run.rounds.iloc[: -newest - 1 : -1]
    texts = {
        readable(name): [_cell(name, x) for x in picked[name]]
        for name in picked.columns.astype(str)
        if name not in run.client_group_columns and not name.startswith("lr-")
    }
    return without_empty_columns(text_table([]).assign(round=picked.index.astype("str"), **texts))


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
    return TEXTS[COLUMNS[column].unit](value) if math.isfinite(value) else NOTHING


def _cost(label: str, outcome: Outcome, value: float) -> tuple[str, str, str]:
    return label, bytes_text(value), _each(bytes_text(outcome.per_client(value)))


def _tested_of(tested: float, clients: float) -> str:
    """`10`, or `5 of 10 tested`."""
    every = count_text(clients)
    return every if tested == clients else f"{count_text(tested)} of {every} tested"


def _stored(value: float) -> str:
    """Clients of most methods keep nothing; then there is nothing to show."""
    return bytes_text(value) if value else NOTHING


def _each(text: str) -> str:
    return "" if text == NOTHING else f"{text} per client"
