"""The table of a comparison: the final values of each run, or of each group of seeds."""

import math
from collections.abc import Callable, Sequence

from pandas import DataFrame

from lightfed.results import units
from lightfed.results.columns import OF_CLIENTS, base_name
from lightfed.results.groups import Group, final_text
from lightfed.results.intervals import goal_text, resolution_text, seeds_text
from lightfed.results.outcome import costs_to, mean_and_std, outcome_of
from lightfed.results.tables import readable, rounds_text, text_table, without_empty_columns
from lightfed.studies.fedbcd.clouds import common_target, time_to
from lightfed.studies.flexifed.stages import AGGREGATED, TRAINED, stage_columns

STAGES = (AGGREGATED, TRAINED)


def comparison_table(
    rows: Sequence[Group], column: str, *, target: float | None = None
) -> DataFrame:
    """One row of final values per run or group, without empty columns.

    `target` is the value of the metric up to which rounds, bytes, FLOPs and virtual time are
    counted; by default virtual time alone, up to what all runs that have it reached.
    """
    goal = common_target(rows, column) if target is None else target
    metric = base_name(column)
    staged = any(len(stage_columns(row, metric)) == len(STAGES) for row in rows)
    cells = [_row(row, column, goal, _until(row, column, target), staged=staged) for row in rows]
    table = without_empty_columns(text_table(cells))
    named = all(row.label.startswith(row.algorithm) for row in rows)
    return table.drop(columns="algorithm", errors="ignore") if named else table


def _row(
    row: Group, column: str, goal: float, until: dict[str, str], *, staged: bool
) -> dict[str, str]:
    outcomes = [outcome_of(run, primary=column) for run in row.runs]
    metric = base_name(column)
    name = readable(metric)

    def final(column: str) -> str:
        return final_text(row, column) if column else units.NOTHING

    def mean(text: Callable[[float], str], figure: str) -> str:
        return text(mean_and_std([getattr(o, figure) for o in outcomes])[0])

    stages = stage_columns(row, metric) if staged else {}
    kinds = {} if staged else {kind: text for kind, (text, _) in OF_CLIENTS.items()}
    time = time_to(row, column, goal)
    reached = math.isfinite(time[0]) or {*until.values()} - {units.NOTHING}
    clients = [run.num_clients or math.nan for run in row.runs]
    return {
        "run": row.label,
        "n": str(len(row.runs)),
        "seed": seeds_text(sorted(run.seed for run in row.runs if run.seed is not None))
        or units.NOTHING,
        "algorithm": _stated(row, "algorithm"),
        "data": _stated(row, "dataset"),
        "clients": units.count_text(mean_and_std(clients)[0]),
        "rounds": ", ".join(dict.fromkeys(map(rounds_text, row.runs))),
        f"global {name}": final(f"global/{metric}"),
        **{f"{name} {stage}": final(stages.get(stage, "")) for stage in STAGES},
        f"personal {name}": final(f"personal/{metric}"),
        "worst 10 %": final(f"personal/{metric}_worst10"),
        **{f"{text} {name}": final(f"{kind}/{metric}") for kind, text in kinds.items()},
        "train loss": final("train_loss"),
        "sent": mean(units.bytes_text, "sent"),
        "between servers": mean(units.bytes_text, "server_bytes"),
        "compute": mean(units.flops_text, "flops"),
        "stored / client": mean(
            lambda x: units.bytes_text(x) if x else units.NOTHING, "stored_bytes"
        ),
        "time / round": mean(units.seconds_text, "seconds_per_round"),
        **until,
        f"virtual time to {goal_text(column, goal)}": units.virtual_text(*time),
        "its resolution": resolution_text(row.runs, column) if reached else units.NOTHING,
    }


def _until(row: Group, column: str, target: float | None) -> dict[str, str]:
    """What a target cost, if one is asked for: means over the seeds, if all reached it."""
    if target is None:
        return {}
    rounds, sent, flops = costs_to(target, row.runs, column)
    return {
        f"rounds to {goal_text(column, target)}": units.metric_text("", rounds),
        "sent until then": units.bytes_text(sent),
        "compute until then": units.flops_text(flops),
    }


def _stated(row: Group, key: str) -> str:
    """The values of a key in the runs' environments, without repeats."""
    said = [str(run.environment[key]) for run in row.runs if run.environment.get(key) is not None]
    return ", ".join(dict.fromkeys(said)) or units.NOTHING
