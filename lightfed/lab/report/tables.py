"""The final values of runs as tables of text, for the terminal and the page."""

import math
from collections.abc import Sequence

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
    OF_CLIENTS,
    TIME,
    Run,
    base_name,
    primary_metric,
    totals,
    worst_tenth,
)
from lightfed.lab.results.text import NOTHING, metric_text, readable
from lightfed.lab.studies.dispfl import AGGREGATED, TRAINED, stage_columns
from lightfed.utils.errors import require

STAGES = (AGGREGATED, TRAINED)


def headline(run: Run) -> str:
    """One line: `HeteroFL on Digits, 20 clients in 5 groups, 30 rounds, seed 0, 4 ranks`."""
    stated = run.environment
    clients = run.num_clients or 0
    parts = [f"{run.algorithm} on {run.data}{run.note}", text.counted(clients, "client")]

    groups = len(run.client_groups)
    if groups > 1:
        parts[-1] += f" in {groups} groups"

    tested = stated.get("evaluated_clients") or clients
    if tested < clients:
        parts.append(f"personal metrics of {tested:,} of {clients:,} clients")

    rounds = "round" if run.last_round == 1 else "rounds"
    parts.append(f"{rounds_text(run)} {rounds}")
    parts.append(f"seed {run.seed}")
    parts.append(text.counted(stated.get("ranks", 1), "rank"))

    failures = failures_text(run)
    if failures != NOTHING:
        parts.append(f"{failures} sessions left out")
    if stated.get("reconfigured"):
        parts.append("other settings in some rounds")
    return ", ".join(parts)


def measured(run: Run) -> str:
    """A sentence that says which model `personal` metrics are of; empty if there are none."""
    holds = str(run.environment.get("personal") or "what a client holds")
    moments = {"aggregated": ", after aggregation", "trained": ", as its session left it"}
    when = moments.get(str(run.environment.get("evaluate_at")), "")
    known = run.has(f"personal/{base_name(primary_metric(run))}")
    return f"Personal: {holds}{when}, on the client's own test samples." if known else ""


def rounds_text(run: Run) -> str:
    """`60`, or `38 of 60` for an unfinished run."""
    of = "" if run.finished else f" of {run.planned or 'any number of'}"
    return f"{run.last_round}{of}"


def failures_text(run: Run) -> str:
    """`3 of 60`: sessions that are in no merge; a dash without any."""
    out, all_ = (run.series(name).sum() for name in ("excluded", "participants"))
    return f"{text.count_text(out)} of {text.count_text(all_)}" if out else NOTHING


def comparison_table(
    rows: Sequence[Group],
    column: str,
    *,
    target: float | None = None,
    of_target: str = "",
    columns: Sequence[str] = (),
    std: bool = False,
) -> DataFrame:
    """One row of final values per run or group, without empty columns.

    `target` is the value of the metric, or of the column `of_target`, up to which rounds, bytes,
    FLOPs and virtual time are counted; by default virtual time alone, up to what all runs that have
    it reached. `columns` of metrics.csv replace the usual ones. `std` shows deviations over seeds
    instead of intervals.
    """
    metric, interval = base_name(column), interval_head(rows, std=std)
    name = readable(metric)
    staged = any(len(stage_columns(row, metric)) == len(STAGES) for row in rows)
    timed = [run for run in runs_of(rows) if run.has(TIME)]
    aimed = of_target or column
    goal = reached_by_all(timed, aimed) if target is None else target
    aim = text.goal_text(aimed, goal)

    def cells(row: Group) -> dict[str, str]:
        stages = stage_columns(row, metric) if staged else {}
        others = {f"{OF_CLIENTS[k][0]} {name}": k for k in (["local"] if staged else OF_CLIENTS)}
        finals = {
            f"global {name}": f"global/{metric}",
            **{f"{name} {stage}": stages.get(stage, "") for stage in STAGES},
            f"personal {name}": f"personal/{metric}",
            "worst 10 %": f"personal/{metric}_worst10",
            **{head: f"{kind}/{metric}" for head, kind in others.items()},
            "train loss": "train_loss",
        }
        if columns:
            finals = {readable(own): own for own in columns}
        cost = DataFrame([totals(run) for run in row.runs]).mean()
        spent = DataFrame([cost_to(goal, run, aimed) for run in row.runs]).mean(skipna=False)
        rounds, time = spent["rounds"], spent[TIME]
        reached = sum(math.isfinite(cost_to(goal, run, aimed)["rounds"]) for run in row.runs)
        lacks = f"reached by {reached} of {len(row.runs)}"
        whole = reached == len(row.runs)
        until = {
            f"rounds to {aim}": metric_text("", rounds) if whole else lacks,
            "sent until then": text.bytes_text(spent["bytes"]),
            "compute until then": text.flops_text(spent["FLOPs"]),
        }
        return {
            "run": row.label,
            "n": str(len(row.runs)),
            "seed": text.seeds_text(sorted(run.seed for run in row.runs if run.seed is not None)),
            "data": row.condition,
            "clients": text.count_text(row.runs[0].num_clients or math.nan),
            "rounds": ", ".join(dict.fromkeys(map(rounds_text, row.runs))),
            **{head + interval: final_text(row, own, std=std) for head, own in finals.items()},
            "sent": text.bytes_text(cost["sent"]),
            "between servers": text.bytes_text(cost["server_bytes"]),
            "compute": text.flops_text(cost["flops"]),
            "stored / client": text.bytes_text(cost["stored_bytes"] or math.nan),
            "time / round": text.seconds_text(cost["per_round"]),
            **(until if target is not None else {}),
            f"virtual time to {aim}": text.seconds_text(time),
        }

    return _without_empty_columns(DataFrame([cells(row) for row in rows], dtype="str"))


def pivot_table(
    rows: Sequence[Group], columns: Sequence[str], by: str, *, std: bool = False
) -> DataFrame:
    """A row for each method and a column for each value of the setting `by`, such as partition.

    The best of a column has a star, which LaTeX prints in bold. A UserError if the experiments do
    not differ in that setting.
    """
    named = [
        {k: v for k, v in options(row.runs[0].settings).items() if f"{k} ".startswith(f"{by} ")}
        for row in rows
    ]
    heads = told_apart(named)
    fix = "name a setting in which they do, such as partition"
    require(len({*heads}) > 1, "--pivot", f"the runs do not differ in {by}", fix)
    cells: dict[str, dict[str, str]] = {row.label: {"method": row.label} for row in rows}
    for column in columns:
        for head in dict.fromkeys(heads):
            own = [row for row, its in zip(rows, heads, strict=True) if its == head]
            top = best_of({row: row.score(column)[0] for row in own}, column).score(column)[0]
            title = f"{readable(column)}, " * (len(columns) > 1) + (head or "else")
            for row in own:
                star = "*" * (row.score(column)[0] == top and len(own) > 1)
                cells[row.label][title] = star + final_text(row, column, std=std)
    return DataFrame([*cells.values()], dtype="str").fillna(text.NOTHING)


def key_figures(run: Run) -> DataFrame:
    """The final values of a run: `figure`, `final`, and a `note` that may be empty."""
    column, total = primary_metric(run), totals(run)
    finals = comparison_table(singles([run]), column).iloc[0]
    finals = finals.drop(["run", "n", "seed", "data", "clients"], errors="ignore")
    name = readable(base_name(column))
    most, at = run.best(column)
    std = run.evaluation.reindex(columns=[base_name(column)]).std(ddof=0).iloc[0]
    up, down = (text.bytes_text(total[f"bytes_{way}"]) for way in ("up", "down"))
    notes = {
        f"personal {name}": f"std over clients {metric_text(column, std)}",
        "sent": f"{up} up, {down} down",
        "compute": f"{text.flops_text(total['flops'] / (run.num_clients or math.nan))} per client",
        "time / round": f"{text.seconds_text(total['seconds'])} in all",
        **{f"{kind} {name}": said for kind, said in OF_CLIENTS.values()},
    }
    if at:
        chosen = f"best {metric_text(column, most)} in round {at}"
        notes[readable(column)] = "; ".join(filter(None, (chosen, notes.get(readable(column)))))
    table = DataFrame({"figure": finals.index, "final": finals.to_numpy()}, dtype="str")
    return table.assign(note=table["figure"].map(notes).fillna(""))


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
        own = tested[name]
        scores, size = own[metric], run.group_sizes.get(name, len(own))
        up, down, flops = (cost / size for cost in run.costs.get(name, (math.nan,) * 3))
        row = {
            "group": name,
            "clients": f"{len(own):,} of " * (len(own) < size) + f"{size:,}",
            readable(metric): metric_text(metric, scores.mean()),
            "std over clients": metric_text(metric, scores.std(ddof=0)),
            "worst 10 %": metric_text(metric, worst_tenth(scores, metric)),
            "of the global model": metric_text(metric, own[f"local/{metric}"].mean()),
            "up / client": text.bytes_text(up),
            "down / client": text.bytes_text(down),
            "compute / client": text.flops_text(flops),
            "stored / client": text.bytes_text(own["stored_bytes"].mean() or math.nan),
        }
        rows.append(row)
    return _without_empty_columns(DataFrame(rows, dtype="str"))


def _without_empty_columns(table: DataFrame) -> DataFrame:
    """The table without columns in which nothing was measured; the first one stays."""
    return table[[name for i, name in enumerate(table) if i == 0 or (table[name] != NOTHING).any()]]
