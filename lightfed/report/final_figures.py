"""The final values of each run, or of each group of seeds: of a comparison and of one run."""

import math
from collections.abc import Sequence

from pandas import DataFrame

from lightfed.results import tables, units
from lightfed.results.columns import OF_CLIENTS, base_name
from lightfed.results.groups import Group, final_heading, final_text, singles
from lightfed.results.intervals import goal_text, resolution_text, seeds_text
from lightfed.results.outcome import best, costs_to, primary_metric, totals
from lightfed.results.run import Run
from lightfed.results.tables import readable, text_table
from lightfed.studies.dispfl import AGGREGATED, TRAINED, stage_columns
from lightfed.studies.fedbcd import common_target, time_to

STAGES = (AGGREGATED, TRAINED)
ABOUT = ("run", "n", "seed", "algorithm", "data", "clients")
COSTS = {
    "sent": ("sent", units.bytes_text),
    "between servers": ("server_bytes", units.bytes_text),
    "compute": ("flops", units.flops_text),
    "stored / client": ("stored_bytes", tables.stored_text),
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
        others = {f"{OF_CLIENTS[k][0]} {name}": k for k in (["local"] if staged else OF_CLIENTS)}
        finals = {
            f"global {name}": f"global/{metric}",
            **{f"{name} {stage}": stages.get(stage, "") for stage in STAGES},
            f"personal {name}": f"personal/{metric}",
            "worst 10 %": f"personal/{metric}_worst10",
            **{text: f"{kind}/{metric}" for text, kind in others.items()},
            "train loss": "train_loss",
        }
        each = DataFrame([totals(run) for run in row.runs]).mean()
        return {
            "run": row.label,
            "n": str(len(row.runs)),
            "seed": seeds_text(sorted(run.seed for run in row.runs if run.seed is not None)),
            "algorithm": row.algorithm,
            "data": row.condition,
            "clients": units.count_text(row.runs[0].num_clients or math.nan),
            "rounds": ", ".join(dict.fromkeys(map(tables.rounds_text, row.runs))),
            **{final_heading(head, rows): final_text(row, own) for head, own in finals.items()},
            **{head: text(each[cost]) for head, (cost, text) in COSTS.items()},
            **_until(row, column, goal, asked=target is not None),
        }

    table = tables.without_empty_columns(text_table([cells(row) for row in rows]))
    named = all(row.label.startswith(row.algorithm) for row in rows)
    return table.drop(columns="algorithm", errors="ignore") if named else table


def key_figures(run: Run) -> DataFrame:
    """The final values of a run: `figure`, `final`, and a `note` that may be empty."""
    column, total = primary_metric(run), totals(run)
    finals = comparison_table(singles([run]), column).iloc[0].drop([*ABOUT], errors="ignore")
    name = readable(base_name(column))
    most, at = best(run, column)
    std = run.evaluation.reindex(columns=[base_name(column)]).std(ddof=0).iloc[0]
    notes = {
        f"personal {name}": f"std over clients {units.metric_text(column, std)}",
        "sent": "{} up, {} down".format(
            *(units.bytes_text(total[f"bytes_{way}"]) for way in ("up", "down"))
        ),
        "compute": f"{units.flops_text(total['flops'] / (run.num_clients or math.nan))} per client",
        "time / round": f"{units.seconds_text(total['seconds'])} in all",
    }
    notes |= {f"{text} {name}": said for text, said in OF_CLIENTS.values()}
    if at:
        chosen = f"best {units.metric_text(column, most)} in round {at}"
        notes[readable(column)] = "; ".join(filter(None, (chosen, notes.get(readable(column)))))
    return text_table(
        [
            {"figure": head, "final": text, "note": notes.get(head, "")}
            for head, text in zip(map(str, finals.index), finals, strict=True)
        ]
    )


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
