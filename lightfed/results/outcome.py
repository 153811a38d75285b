"""The result of a run: its primary metric and final values, also for each client group.

Every number on a page, in a table or in a comparison is computed here, once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lightfed.results.columns import KINDS, base_name, is_metric, kind_of
from lightfed.results.run import Run
from lightfed.results.units import direction, is_share, lower_is_better

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Spread = TypeVar("Spread", float, "Series")
Item = TypeVar("Item")
NAN = math.nan
LEVEL = 0.95  # of intervals
SPENT = ("bytes_up", "bytes_down", "flops")
COSTS = (*SPENT, "stored_bytes")
GROUP_COLUMNS = ("clients", "tested", "mean", "std", "worst10", "local", *COSTS)
TOTALS = ("bytes_up", "bytes_down", "server_bytes", "flops", "seconds")  # over all rounds


def totals(run: Run) -> dict[str, float]:
    """Over all clients and rounds: TOTALS, and `sent`, the bytes up and down; NaN if unknown.

    `per_round` are the mean seconds of the timed rounds, and `stored_bytes` those kept by a client,
    mean over the clients of the last evaluation.
    """
    found = {name: float(run.series(name).sum(min_count=1)) for name in TOTALS}
    kept = run.evaluation["stored_bytes"].mean() if "stored_bytes" in run.evaluation else NAN
    found |= {"sent": float(traffic(run).max()), "stored_bytes": float(kept)}
    return found | {"per_round": found["seconds"] / max(1, run.series("seconds").count())}


def best(run: Run, column: str) -> tuple[float, int]:
    """The best value of a column, and its round; NaN and 0 without any."""
    values = run.series(column).dropna()
    if values.empty:
        return NAN, 0
    place = int(values.argmin() if lower_is_better(column) else values.argmax())
    return float(values.iloc[place]), int(values.index[place])


def best_of(scores: Mapping[Item, float], metric: str) -> Item:
    """The key of the best of at least one score."""
    return max(scores, key=lambda item: direction(metric) * scores[item])


def primary_metric(run: Run) -> str:
    """The run's main column: accuracy, else the first metric, else the training loss."""

    def rank(column: str) -> tuple[bool, bool, int]:
        metric = base_name(column)
        return metric != "accuracy", not is_share(metric), KINDS.index(kind_of(column))

    measured = filter(run.has, map(str, run.rounds))
    own = [n for n in measured if _is_mean(n, run) and "loss" not in n.lower()]
    return min(own, key=rank, default="train_loss")


def base_names(run: Run) -> list[str]:
    """The metrics of a run including losses, each once, in the order of the columns."""
    return list(
        dict.fromkeys(base_name(name) for name in map(str, run.rounds) if _is_mean(name, run))
    )


def client_metric(run: Run, metric: str) -> str | None:
    """The column of clients.csv for `metric`, or a substitute; None if there is none."""
    if metric in run.client_metrics:
        return metric
    return min(run.client_metrics, key=lower_is_better, default=None)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Of the finite values; the sample deviation is NaN below two of them."""
    known = np.array([value for value in values if math.isfinite(value)])
    mean = float(known.mean()) if len(known) else NAN
    return mean, float(known.std(ddof=1)) if len(known) > 1 else NAN


def t_half_width(std: Spread, n: int) -> Spread:
    """Half the 95 % t interval of a mean of n values with this sample deviation; NaN below two."""
    from scipy.special import stdtrit  # scipy.stats would take a second to import

    return std * (float(stdtrit(n - 1, (1 + LEVEL) / 2)) / math.sqrt(n) if n > 1 else NAN)


def when_reached(target: float, values: Series, at: Series, metric: str) -> float:
    """The entry of `at` at which a metric first reaches a target; NaN if it never does.

    `values` are those of the metric and `at`, for example the seconds until then, by round. The
    name of the metric says whether lower is better.
    """
    there = at[direction(metric) * (values - target) >= 0]
    return float(there.iloc[0]) if len(there) else NAN


def reached_by_all(runs: Iterable[Run], column: str) -> float:
    """The value that all runs with this column reach: the worst of their best. NaN without any."""
    reached = [value for run in runs if math.isfinite(value := best(run, column)[0])]
    return min(reached, key=lambda value: direction(column) * value, default=NAN)


def each_seed_once(runs: Sequence[Run]) -> list[Run]:
    """The longest run of each seed.

    Sweeps of several studies share experiments. Two runs of one seed have the same bits, so
    counting both would understate the deviation.
    """
    every = sorted(runs, key=lambda run: len(run.rounds))
    longest = {run.environment.get("seed", run.folder): run for run in every}.values()
    return [run for run in runs if run in longest]


def traffic(run: Run) -> Series:
    """By round: bytes up and down of all clients since the start of the run."""
    both = run.rounds.reindex(columns=["bytes_up", "bytes_down"])
    return both.sum(axis=1).cumsum().where(both.notna().any(axis=1))


def costs_to(target: float, runs: Iterable[Run], column: str) -> list[float]:
    """Rounds, bytes and FLOPs of all clients until a column first reached a target.

    Means over the runs; NaN unless all reached it.
    """
    found = []
    for run in runs:
        flops = run.series("flops").fillna(0.0).cumsum()
        spent = (run.rounds.index.to_series(), traffic(run), flops)
        found.append([when_reached(target, run.series(column), at, column) for at in spent])
    return [float(mean) for mean in np.mean(found, axis=0)]


def worst_tenth(values: Series, metric: str) -> float:
    """The mean of the worst tenth (rounded up) of the known values; inf if one is not finite."""
    known = values.dropna()
    if np.isinf(known).any():
        return math.inf
    worst = known.nsmallest if direction(metric) > 0 else known.nlargest
    return float(worst(math.ceil(len(known) / 10)).mean())


def client_groups(run: Run, metric: str) -> DataFrame:
    """A row a client group at the last personalised evaluation; what is unknown is NaN.

    Columns: `clients` of the group, how many were `tested`, `mean` and `std` (population) over
    these, each with its own model, `worst10` (mean over the worst tenth), `local` (mean of the
    global model on the clients' samples) and the mean of what they keep; of what all clients of the
    group have sent and computed since the start, the mean over these. No rows without clients.csv.
    """
    import pandas as pd

    if run.evaluation.empty:
        return pd.DataFrame(columns=[*GROUP_COLUMNS])
    own = client_metric(run, metric)
    columns = [*dict.fromkeys(name for name in (own, f"local/{own}", "stored_bytes") if name)]
    groups = run.evaluation.reindex(columns=["group", *columns]).groupby("group")
    found = groups[columns].mean().rename(columns={own: "mean", f"local/{own}": "local"})
    scores = groups[own] if own else None
    found["tested"] = groups.size()
    found["std"] = scores.std(ddof=0) if scores else NAN
    found["worst10"] = scores.apply(lambda x: worst_tenth(x, own or "")) if scores else NAN
    sizes = pd.Series(run.group_sizes, dtype=float)
    found["clients"] = sizes.reindex(found.index).fillna(found["tested"])
    at, sums = run.costs or (0, ())
    if at == run.last_round and len(sums) == len(sizes):
        spent = pd.DataFrame(sums, index=sizes.index, columns=[*SPENT])
        found = found.join(spent.div(sizes, axis=0))
    order = [name for name in run.client_groups if name in found.index]
    return found.reindex(index=order, columns=[*GROUP_COLUMNS])


def _is_mean(column: str, run: Run) -> bool:
    """Whether a column is a metric of the whole run: not of a group, not a spread."""
    of = re.sub("_(std|worst10)$", "", column)
    return (
        is_metric(column)
        and column not in run.client_group_columns
        and (of == column or of not in run.rounds)
    )
