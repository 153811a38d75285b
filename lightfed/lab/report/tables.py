"""The final values of runs as tables of text, for the terminal and the page."""

import math
from collections.abc import Mapping, Sequence

from pandas import DataFrame

from lightfed.lab.results import text
from lightfed.lab.results.groups import (
    Group,
    best_of,
    cost_to,
    final_text,
    interval_head,
    options,
    reached_by_all,
    runs_of,
    singles,
    told_apart,
)
from lightfed.lab.results.run import (
    ENERGY,
    OF_CLIENTS,
    TIME,
    VALIDATION,
    Run,
    base_name,
    primary_metric,
    totals,
)
from lightfed.lab.results.text import NOTHING, metric_text, readable
from lightfed.lab.studies.dispfl import AGGREGATED, TRAINED, stage_columns
from lightfed.utils.errors import UserError

STAGES = (AGGREGATED, TRAINED)

# When clients were tested, in words, by the recorded moment.
_MOMENTS = {"aggregated": ", after aggregation", "trained": ", as its session left it"}


def headline(run: Run) -> str:
    """Return one line: `HeteroFL on Digits, 20 clients in 5 groups, 30 rounds, seed 0, 4 ranks`."""
    record = run.environment
    clients = run.num_clients or 0
    parts = [f"{run.algorithm} on {run.data}{run.note}", text.counted(clients, "client")]

    groups = len(run.client_groups)
    if groups > 1:
        parts[-1] += f" in {groups} groups"

    tested = record.get("evaluated_clients") or clients
    if tested < clients:
        parts.append(f"personal metrics of {tested:,} of {clients:,} clients")

    rounds = "round" if run.last_round == 1 else "rounds"
    parts.append(f"{rounds_text(run)} {rounds}")
    parts.append(f"seed {run.seed}")
    parts.append(text.counted(record.get("ranks", 1), "rank"))

    failures = failures_text(run)
    if failures != NOTHING:
        parts.append(f"{failures} sessions skipped")
    if record.get("reconfigured"):
        parts.append("other settings in some rounds")
    return ", ".join(parts)


def measured(run: Run) -> str:
    """Return a sentence that says what `personal` metrics measure; empty if there are none."""
    if not run.has(f"personal/{base_name(primary_metric(run))}"):
        return ""
    model = str(run.environment.get("personal") or "what a client holds")
    moment = _MOMENTS.get(str(run.environment.get("evaluate_at")), "")
    return f"In personal metrics, each client tests {model}{moment}, on its own test samples."


def rounds_text(run: Run) -> str:
    """Return `60`, or `38 of 60` for an unfinished run."""
    if run.finished:
        return f"{run.last_round}"
    return f"{run.last_round} of {run.planned or 'any number of'}"


def failures_text(run: Run) -> str:
    """Return the number of sessions that are in no merge as `3 of 60`; a dash without any."""
    excluded = run.series("excluded").sum()
    if not excluded:
        return NOTHING
    participants = run.series("participants").sum()
    return f"{text.count_text(excluded)} of {text.count_text(participants)}"


def comparison_table(
    rows: Sequence[Group],
    column: str,
    *,
    target: float | None = None,
    of_target: str = "",
    columns: Sequence[str] = (),
    std: bool = False,
) -> DataFrame:
    """Return a table with a row of final values for each run or group, without empty columns.

    Args:
        rows: The runs or groups.
        column: The column of metrics.csv that the comparison is about.
        target: The value up to which rounds, bytes, FLOPs and virtual time are counted. Without
            one, only virtual time is, up to the value that all runs with virtual time reached.
        of_target: The column that the target is a value of; by default `column`.
        columns: Columns of metrics.csv to show instead of the usual ones.
        std: Whether to show deviations over seeds instead of intervals.
    """
    metric = base_name(column)
    interval = interval_head(rows, std=std)
    shows_stages = any(len(stage_columns(row, metric)) == len(STAGES) for row in rows)

    target_column = of_target or column
    goal = target
    if goal is None:
        timed_runs = [run for run in runs_of(rows) if run.has(TIME)]
        goal = reached_by_all(timed_runs, target_column)

    table = []
    for row in rows:
        cells = _description_cells(row)

        if columns:
            column_of_head = {readable(name): name for name in columns}
        else:
            column_of_head = _usual_columns(row, metric, shows_stages=shows_stages)
        for head, name in column_of_head.items():
            cells[head + interval] = final_text(row, name, std=std)

        cells |= _cost_cells(row)
        cells |= _cells_until(row, target_column, goal, only_time=target is None)
        table.append(cells)

    return _without_empty_columns(DataFrame(table, dtype="str"))


def _description_cells(row: Group) -> dict[str, str]:
    """Return the cells that say what a row is of."""
    seeds = sorted(run.seed for run in row.runs if run.seed is not None)
    different_rounds = dict.fromkeys(rounds_text(run) for run in row.runs)
    return {
        "run": row.label,
        "n": str(len(row.runs)),
        "seed": text.seeds_text(seeds),
        "data": row.condition,
        "clients": text.count_text(row.runs[0].num_clients or math.nan),
        "rounds": ", ".join(different_rounds),
    }


def _usual_columns(row: Group, metric: str, *, shows_stages: bool) -> dict[str, str]:
    """Return the columns of metrics.csv that a row shows, by the heads of the table.

    Args:
        row: The run or group.
        metric: The metric, without what it is of.
        shows_stages: Whether a client's model is shown at both stages of a round.
    """
    name = readable(metric)
    column_of_head = {f"global {name}": f"global/{metric}"}

    stages = stage_columns(row, metric) if shows_stages else {}
    for stage in STAGES:
        # A stage that the row does not have is an empty cell.
        column_of_head[f"{name} {stage}"] = stages.get(stage, "")

    column_of_head[f"personal {name}"] = f"personal/{metric}"
    column_of_head["worst 10 %"] = f"personal/{metric}_worst10"

    # The stages show the other models of clients under names of their own.
    kinds = ["local"] if shows_stages else list(OF_CLIENTS)
    for kind in kinds:
        head, _ = OF_CLIENTS[kind]
        column_of_head[f"{head} {name}"] = f"{kind}/{metric}"

    column_of_head["train loss"] = "train_loss"
    return column_of_head


def _cost_cells(row: Group) -> dict[str, str]:
    """Return the costs of whole runs, as means over the runs of a row."""
    cost = DataFrame([totals(run) for run in row.runs]).mean()
    return {
        "sent": text.bytes_text(cost["sent"]),
        "between servers": text.bytes_text(cost["server_bytes"]),
        "compute": text.flops_text(cost["flops"]),
        "energy": text.joules_text(cost[ENERGY]),
        "stored / client": text.bytes_text(cost["stored_bytes"] or math.nan),
        "time / round": text.seconds_text(cost["per_round"]),
    }


def _cells_until(row: Group, column: str, goal: float, *, only_time: bool) -> dict[str, str]:
    """Return the costs until a value of a column was reached, as means over the runs of a row."""
    costs = [cost_to(goal, run, column) for run in row.runs]
    # The mean of the runs that have reached it would be that of other runs than the row's.
    mean = DataFrame(costs).mean(skipna=False)
    goal_text = text.goal_text(column, goal)

    cells = {}
    if not only_time:
        reached = sum(math.isfinite(cost["rounds"]) for cost in costs)
        if reached == len(row.runs):
            cells[f"rounds to {goal_text}"] = metric_text("", mean["rounds"])
        else:
            cells[f"rounds to {goal_text}"] = f"reached by {reached} of {len(row.runs)}"
        cells["sent until then"] = text.bytes_text(mean["bytes"])
        cells["compute until then"] = text.flops_text(mean["FLOPs"])

    cells[f"virtual time to {goal_text}"] = text.seconds_text(mean[TIME])
    cells[f"energy to {goal_text}"] = text.joules_text(mean[ENERGY])
    return cells


def pivot_table(
    rows: Sequence[Group], columns: Sequence[str], by: str, *, std: bool = False
) -> DataFrame:
    """Return a table with a row for each method and a column for each value of a setting.

    The best of a column has a star, which LaTeX prints in bold.

    Args:
        rows: The experiments.
        columns: The columns of metrics.csv to show.
        by: The setting, such as partition; its own settings count, too.
        std: Whether to show deviations over seeds instead of intervals.

    Raises:
        UserError: The experiments do not differ in that setting.
    """
    settings_of_rows = []
    for row in rows:
        settings = {}
        for name, value in options(row.runs[0].settings).items():
            if name == by or name.startswith(f"{by} "):
                settings[name] = value
        settings_of_rows.append(settings)

    heads = told_apart(settings_of_rows)
    if len(set(heads)) < 2:
        raise UserError(
            key="--pivot",
            found=f"the runs do not differ in {by}",
            fix="name a setting in which they do, such as partition",
        )

    rows_of_head: dict[str, list[Group]] = {}
    for row, head in zip(rows, heads, strict=True):
        rows_of_head.setdefault(head, []).append(row)

    cells_of_label: dict[str, dict[str, str]] = {row.label: {"method": row.label} for row in rows}
    for column in columns:
        for head, members in rows_of_head.items():
            title = head or "else"
            if len(columns) > 1:
                title = f"{readable(column)}, {title}"

            score_of = {row: row.score(column)[0] for row in members}
            best_score = score_of[best_of(score_of, column)]
            for row in members:
                cell = final_text(row, column, std=std)
                if len(members) > 1 and score_of[row] == best_score:
                    cell = f"*{cell}"
                cells_of_label[row.label][title] = cell

    return DataFrame(list(cells_of_label.values()), dtype="str").fillna(NOTHING)


def key_figures(run: Run) -> DataFrame:
    """Return the final values of a run in the columns `metric`, `final` and `note`.

    A note can be empty.
    """
    column = primary_metric(run)
    finals = comparison_table(singles([run]), column).iloc[0]
    finals = finals.drop(["run", "n", "seed", "data", "clients"], errors="ignore")

    table = DataFrame({"metric": finals.index, "final": finals.to_numpy()}, dtype="str")
    table = table.assign(note=table["metric"].map(_notes(run, column)).fillna(""))

    metric = base_name(column)
    is_worst = table["metric"] == "worst 10 %"
    if is_worst.any() and _chooses_worst_clients(run, metric):
        by_test = table.loc[is_worst, "final"].item()
        note = (
            f"of the clients that are worst on validation samples; {by_test} if test samples say so"
        )
        value = metric_text(metric, run.worst_clients(metric))
        table.loc[is_worst, ["final", "note"]] = [value, note]
    return table


def _chooses_worst_clients(run: Run, metric: str) -> bool:
    """Return whether validation samples say which clients are the worst.

    They do in the evaluation that the last figures are of, and not in an earlier one.
    """
    if metric not in run.evaluation or not run.validates_clients(metric):
        return False
    measured = run.series(f"personal/{metric}").dropna()
    return not measured.empty and int(run.evaluation["round"].iloc[0]) == int(measured.index[-1])


def _notes(run: Run, column: str) -> Mapping[str, str]:
    """Return what is said beside the final values of a run, by the heads of the table."""
    metric = base_name(column)
    name = readable(metric)
    total = totals(run)
    std = run.evaluation.reindex(columns=[metric]).std(ddof=0).iloc[0]
    bytes_up = text.bytes_text(total["bytes_up"])
    bytes_down = text.bytes_text(total["bytes_down"])
    flops_per_client = text.flops_text(total["flops"] / (run.num_clients or math.nan))

    notes = {
        f"personal {name}": f"std over clients {metric_text(column, std)}",
        "sent": f"{bytes_up} up, {bytes_down} down",
        "compute": f"{flops_per_client} per client",
        "time / round": f"{text.seconds_text(total['seconds'])} in all",
    }
    for head, explanation in OF_CLIENTS.values():
        notes[f"{head} {name}"] = explanation
    half = run.final(f"gap/{metric}_half")
    if math.isfinite(half):
        gap = metric_text(column, run.final(f"gap/{metric}"), half)
        head, explanation = OF_CLIENTS["gap"]
        notes[f"{head} {name}"] = f"{explanation}: {gap} over clients"

    best, best_round = run.best(column)
    if best_round > 0:
        head = readable(column)
        note = f"best {metric_text(column, best)} in round {best_round}"
        if run.chosen_by(column) != column:
            note = f"{metric_text(column, best)} in round {best_round}, best on validation samples"
        notes[head] = f"{note}; {notes[head]}" if head in notes else note
    return notes


def client_group_table(run: Run) -> DataFrame:
    """Return a table with a row for each client group.

    It has metrics of the clients' models and, if it is another, of the global model. Metrics, and
    bytes kept, are means over the clients that were tested. Bytes sent and FLOPs are means over all
    clients of the group, counted from the start of the run.
    """
    metric = base_name(primary_metric(run))
    columns = ["group", metric, VALIDATION + metric, f"local/{metric}", "stored_bytes"]
    tested_clients = dict(iter(run.evaluation.reindex(columns=columns).groupby("group")))

    rows = []
    for name in run.client_groups:
        if name not in tested_clients:
            continue
        tested = tested_clients[name]
        scores = tested[metric]

        size = run.group_sizes.get(name, len(tested))
        clients = f"{size:,}"
        if len(tested) < size:
            clients = f"{len(tested):,} of {size:,}"

        up, down, flops = run.costs.get(name, (math.nan, math.nan, math.nan))
        row = {
            "group": name,
            "clients": clients,
            readable(metric): metric_text(metric, scores.mean()),
            "std over clients": metric_text(metric, scores.std(ddof=0)),
            "worst 10 %": metric_text(metric, run.worst_clients(metric, tested)),
            "global model": metric_text(metric, tested[f"local/{metric}"].mean()),
            "up / client": text.bytes_text(up / size),
            "down / client": text.bytes_text(down / size),
            "compute / client": text.flops_text(flops / size),
            "stored / client": text.bytes_text(tested["stored_bytes"].mean() or math.nan),
        }
        rows.append(row)
    return _without_empty_columns(DataFrame(rows, dtype="str"))


def _without_empty_columns(table: DataFrame) -> DataFrame:
    """Return a table without columns in which nothing was measured; the first one stays."""
    kept = []
    for position, name in enumerate(table):
        if position == 0 or (table[name] != NOTHING).any():
            kept.append(name)
    return table[kept]
