"""The result of a run: its primary metric, final values, and costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lightfed.results.columns import KINDS, base_name, is_metric, kind_of
from lightfed.results.run import Run
from lightfed.results.units import direction, is_share

if TYPE_CHECKING:
    from pandas import Series

Spread = TypeVar("Spread", float, "Series")
Item = TypeVar("Item")
NAN = math.nan
LEVEL = 0.95  # of intervals
TOTALS = ("bytes_up", "bytes_down", "server_bytes", "flops", "seconds")  # over all rounds


def totals(run: Run) -> dict[str, float]:
    """Over all clients and rounds: TOTALS, and `sent`, the bytes up and down; NaN if unknown.

    `per_round` are the mean seconds of the timed rounds, and `stored_bytes` those kept by a client,
    mean over the clients of the last evaluation.
    """
    found = {name: float(run.series(name).sum(min_count=1)) for name in TOTALS}
    kept = run.evaluation["stored_bytes"].mean() if "stored_bytes" in run.evaluation else NAN
    found |= {"sent": float(traffic(run).max()), "stored_bytes": float(kept)}
    return found | {"per_round": float(run.series("seconds").mean())}


def best(run: Run, column: str) -> tuple[float, int]:
    """The best value of a column, and its round; NaN and 0 without any."""
    values = run.series(column).dropna()
    if values.empty:
        return NAN, 0
    place = int((values * direction(column)).argmax())
    return float(values.iloc[place]), int(values.index[place])


def best_of(scores: Mapping[Item, float], metric: str) -> Item:
    """The key of the best of at least one score."""
    return max(scores, key=lambda item: direction(metric) * scores[item])


def primary_metric(run: Run) -> str:
    """The run's main column: accuracy, else the first metric, else the training loss."""

    def rank(column: str) -> tuple[bool, bool, int]:
        metric = base_name(column)
        return metric != "accuracy", not is_share(metric), KINDS.index(kind_of(column))

    own = [name for name in _means(run) if run.has(name) and "loss" not in name.lower()]
    return min(own, key=rank, default="train_loss")


def base_names(run: Run) -> list[str]:
    """The metrics of a run including losses, each once, in the order of the columns."""
    return list(dict.fromkeys(map(base_name, _means(run))))


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
    longest = {run.seed: run for run in sorted(runs, key=lambda run: len(run.rounds))}
    return [run for run in runs if run in longest.values()]


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


def _means(run: Run) -> list[str]:
    """The columns that are metrics of the whole run: not of a group, not a spread."""
    metrics = filter(is_metric, map(str, run.rounds))
    columns = [name for name in metrics if name not in run.client_group_columns]
    spreads = {name + end for name in columns for end in ("_std", "_worst10")}
    return [name for name in columns if name not in spreads]
