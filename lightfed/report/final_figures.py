"""The table of a comparison: the final values of each run, or of each group of seeds."""

import math
from collections.abc import Sequence

from pandas import DataFrame

from lightfed.results import units
from lightfed.results.columns import OF_CLIENTS, base_name
from lightfed.results.groups import Group, final_heading, final_text
from lightfed.results.intervals import goal_text, resolution_text, seeds_text
from lightfed.results.outcome import costs_to, mean_and_std, totals
from lightfed.results.tables import readable, rounds_text, text_table, without_empty_columns
from lightfed.studies.dispfl import AGGREGATED, TRAINED, stage_columns
from lightfed.studies.fedbcd import common_target, time_to

STAGES = (AGGREGATED, TRAINED)
COSTS = {
    "sent": ("sent", units.bytes_text),
    "between servers": ("server_bytes", units.bytes_text),
    "compute": ("flops", units.flops_text),
    "stored / client": ("stored_bytes", lambda x: units.bytes_text(x or math.nan)),
    "time / round": ("per_round", units.seconds_text),
}


def comparison_table(
    rows: Sequence[Group], column: str, *, target: float | None = None
) -> DataFrame:
    """One row of final values per run or group, without empty columns.

    `target` is the value of the metric up to which rounds, bytes, FLOPs and virtual time are
    counted; by default virtual time alone, up to what all runs that have it reached.
    """
    metric = base_name(column)
    name = readable(metric)
    staged = any(len(stage_columns(row, metric)) == len(STAGES) for row in rows)
    kinds = {} if staged else {f"{text} {name}": kind for kind, (text, _) in OF_CLIENTS.items()}

    def cells(row: Group) -> dict[str, str]:
        stages = stage_columns(row, metric) if staged else {}
        finals = {
            f"global {name}": f"global/{metric}",
            **{f"{name} {stage}": stages.get(stage, "") for stage in STAGES},
            f"personal {name}": f"personal/{metric}",
            "worst 10 %": f"personal/{metric}_worst10",
            **{text: f"{kind}/{metric}" for text, kind in kinds.items()},
            "train loss": "train_loss",
        }
        return {
            **_about(row),
            **{final_heading(head, rows): final_text(row, own) for head, own in finals.items()},
            **_spent(row),
            **_until(row, column, target, common_target(rows, column)),
        }

    table = without_empty_columns(text_table([cells(row) for row in rows]))
    named = all(row.label.startswith(row.algorithm) for row in rows)
    return table.drop(columns="algorithm", errors="ignore") if named else table


def _about(row: Group) -> dict[str, str]:
    seeds = sorted(run.seed for run in row.runs if run.seed is not None)
    clients = [run.num_clients or math.nan for run in row.runs]
    return {
        "run": row.label,
        "n": str(len(row.runs)),
        "seed": seeds_text(seeds) or units.NOTHING,
        "algorithm": row.algorithm,
        "data": row.condition,
        "clients": units.count_text(mean_and_std(clients)[0]),
        "rounds": ", ".join(dict.fromkeys(map(rounds_text, row.runs))),
    }


def _spent(row: Group) -> dict[str, str]:
    """Means over the seeds."""
    each = [totals(run) for run in row.runs]
    return {
        head: text(mean_and_std([spent[name] for spent in each])[0])
        for head, (name, text) in COSTS.items()
    }


def _until(row: Group, column: str, target: float | None, common: float) -> dict[str, str]:
    """What a target cost: means over the seeds, if all reached it."""
    goal = common if target is None else target
    rounds, sent, flops = costs_to(goal, row.runs, column)
    asked = {
        f"rounds to {goal_text(column, goal)}": units.metric_text("", rounds),
        "sent until then": units.bytes_text(sent),
        "compute until then": units.flops_text(flops),
    }
    time = time_to(row, column, goal)
    reached = math.isfinite(time[0]) or (target is not None and math.isfinite(rounds))
    return (asked if target is not None else {}) | {
        f"virtual time to {goal_text(column, goal)}": units.virtual_text(*time),
        "its resolution": resolution_text(row.runs, column) if reached else units.NOTHING,
    }
