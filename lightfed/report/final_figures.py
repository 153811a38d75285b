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
    goal = common_target(rows, column) if target is None else target

    def cells(row: Group) -> dict[str, str]:
        stages = stage_columns(row, metric) if staged else {}
        others = {} if staged else {f"{OF_CLIENTS[kind][0]} {name}": kind for kind in OF_CLIENTS}
        finals = {
            f"global {name}": f"global/{metric}",
            **{f"{name} {stage}": stages.get(stage, "") for stage in STAGES},
            f"personal {name}": f"personal/{metric}",
            "worst 10 %": f"personal/{metric}_worst10",
            **{text: f"{kind}/{metric}" for text, kind in others.items()},
            "train loss": "train_loss",
        }
        each = [totals(run) for run in row.runs]
        return {
            "run": row.label,
            "n": str(len(row.runs)),
            "seed": seeds_text(sorted(run.seed for run in row.runs if run.seed is not None)),
            "algorithm": row.algorithm,
            "data": row.condition,
            "clients": units.count_text(row.runs[0].num_clients or math.nan),
            "rounds": ", ".join(dict.fromkeys(map(rounds_text, row.runs))),
            **{final_heading(head, rows): final_text(row, own) for head, own in finals.items()},
            **{
                head: text(mean_and_std([spent[cost] for spent in each])[0])
                for head, (cost, text) in COSTS.items()
            },
            **_until(row, column, goal, asked=target is not None),
        }

    table = without_empty_columns(text_table([cells(row) for row in rows]))
    named = all(row.label.startswith(row.algorithm) for row in rows)
    return table.drop(columns="algorithm", errors="ignore") if named else table


def _until(row: Group, column: str, goal: float, *, asked: bool) -> dict[str, str]:
    """What a target cost: means over the seeds, if all reached it."""
    rounds, sent, flops = costs_to(goal, row.runs, column)
    spent = {
        f"rounds to {goal_text(column, goal)}": units.metric_text("", rounds),
        "sent until then": units.bytes_text(sent),
        "compute until then": units.flops_text(flops),
    }
    time = time_to(row, column, goal)
    reached = math.isfinite(time[0]) or (asked and math.isfinite(rounds))
    return (spent if asked else {}) | {
        f"virtual time to {goal_text(column, goal)}": units.virtual_text(*time),
        "its resolution": resolution_text(row.runs, column) if reached else units.NOTHING,
    }
