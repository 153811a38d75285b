"""The result of a run: its primary metric and final values, also for each client group.

Every number on a page, in a table or in a comparison is computed here, once.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightfed.results.columns import KINDS, OF_CLIENTS, base_name, is_metric, is_spread, kind_of
from lightfed.results.runfiles import CLIENT_COSTS, Evaluation, Floats, Integers, RunFiles
from lightfed.results.units import direction, is_share, lower_is_better

NAN = math.nan
TOTALS = ("bytes_up", "bytes_down", "server_bytes", "flops", "seconds")  # over all rounds


@dataclass(frozen=True)
class ClientGroupOutcome:
    """One client group at the last personalised evaluation; unknown values are NaN.

    Attributes:
        name: of the client group.
        clients: how many were evaluated, NaN if only their mean is known.
        mean: of the metric over the clients, each with its own model.
        local: the same for the global model on the clients' samples.
        std: population standard deviation over the clients.
        worst10: mean over the worst tenth of the clients.
        bytes_up: since the start of the run, mean over the clients; so are bytes_down and flops.
        stored_bytes: kept by a client, mean over the clients.
    """

    name: str
    clients: float
    mean: float
    std: float = NAN
    worst10: float = NAN
    local: float = NAN
    bytes_up: float = NAN
    bytes_down: float = NAN
    flops: float = NAN
    stored_bytes: float = NAN


@dataclass(frozen=True)
class Outcome:
    """The final values of a run: the last ones measured; NaN if there are none.

    Attributes:
        run: the run.
        primary: the main column of metrics.csv.
        metric: its name without `global/` or `personal/`.
        overall: the metric of the global model.
        personal: mean over the clients, each with its own model and test samples.
        personal_std: its standard deviation over the clients.
        worst10: mean over the worst tenth of the clients.
        of_clients: mean and standard deviation over the clients by kind, of `OF_CLIENTS`.
        best: the best value of the primary column, reached in round `best_round`.
        train_loss: the last finite one, of round `train_loss_round`.
        bytes_up: of all clients and rounds; so are bytes_down and flops.
        server_bytes: between servers and their coordinator, in all rounds.
        stored_bytes: kept by a client, mean over the clients of the last evaluation.
        seconds: of all rounds.
        seconds_per_round: mean over the timed rounds.
        client_metric: the metric of the client groups; None if clients.csv has none.
        client_groups: in the order of their colours.
    """

    run: RunFiles
    primary: str
    metric: str
    overall: float
    personal: float
    personal_std: float
    worst10: float
    of_clients: dict[str, tuple[float, float]]
    best: float
    best_round: int
    train_loss: float
    train_loss_round: int
    bytes_up: float
    bytes_down: float
    server_bytes: float
    flops: float
    stored_bytes: float
    seconds: float
    seconds_per_round: float
    client_metric: str | None
    client_groups: tuple[ClientGroupOutcome, ...]

    @property
    def sent(self) -> float:
        """Sum of bytes up and down; NaN if neither was counted."""
        return total(np.array([self.bytes_up, self.bytes_down]))

    def per_client(self, total: float) -> float:
        return total / self.run.num_clients if self.run.num_clients else NAN


def outcome_of(run: RunFiles, *, primary: str | None = None) -> Outcome:
    """The final values of `primary`, a column of metrics.csv; by default the run's own primary."""
    primary = primary or primary_metric(run)
    metric = base_name(primary)
    best, best_round = _best(run, primary)
    totals: dict[str, Any] = {name: total(run.series(name)) for name in TOTALS}
    timed = int(np.isfinite(run.series("seconds")).sum())
    return Outcome(
        run=run,
        primary=primary,
        metric=metric,
        overall=last(run.series(f"global/{metric}")),
        personal=last(run.series(f"personal/{metric}")),
        personal_std=_personal_std(run, metric),
        worst10=_personal_worst10(run, metric),
        of_clients={
            kind: (last(mean), last(run.series(f"{kind}/{metric}_std")))
            for kind in OF_CLIENTS
            if np.isfinite(mean := run.series(f"{kind}/{metric}")).any()
        },
        best=best,
        best_round=best_round,
        train_loss=last(run.series("train_loss")),
        train_loss_round=int(run.rounds[np.isfinite(run.series("train_loss"))].max(initial=0)),
        **totals,
        stored_bytes=_mean(_client_values(run, "stored_bytes")),
        seconds_per_round=totals["seconds"] / max(1, timed),
        client_metric=client_metric(run.evaluation, metric) if run.evaluation else metric,
        client_groups=_client_groups(run, metric),
    )


def primary_metric(run: RunFiles) -> str:
    """The run's main column: accuracy, else the first metric, else the training loss."""
    measured = [name for name, values in run.metrics.items() if np.isfinite(values).any()]
    own = [n for n in measured if _is_mean(n, run) and "loss" not in n.lower()]
    return min(own, key=_rank, default="train_loss")


def _rank(column: str) -> tuple[bool, bool, int]:
    """Order of preference: `accuracy`, then an accuracy of another name, then by kind."""
    metric = base_name(column)
    return metric != "accuracy", not is_share(metric), KINDS.index(kind_of(column))


def base_names(run: RunFiles) -> list[str]:
    """The metrics of a run including losses, each once, in the order of the columns."""
    return list(dict.fromkeys(base_name(name) for name in run.metrics if _is_mean(name, run)))


def client_metric(evaluation: Evaluation, metric: str) -> str | None:
    """The column of clients.csv for `metric`, or a substitute; None if there is none."""
    if metric in evaluation.metrics:
        return metric
    names = sorted(evaluation.metrics, key=lower_is_better)
    return names[0] if names else None


def last(values: Floats) -> float:
    """The last measured value."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else NAN


def total(values: Floats) -> float:
    """The sum over the measured rounds; NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.sum()) if len(finite) else NAN


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Of the finite values; the sample deviation is NaN below two of them."""
    known = np.array([value for value in values if math.isfinite(value)])
    mean = float(known.mean()) if len(known) else math.nan
    return mean, float(known.std(ddof=1)) if len(known) > 1 else math.nan


def when_reached(target: float, values: Floats, at: Floats | Integers, metric: str) -> float:
    """The entry of `at` at which a metric first reaches a target; NaN if it never does.

    Args:
        target: of the metric.
        values: (R,) of the metric.
        at: (R,) for example the rounds of the values, or the seconds until then.
        metric: its name says whether lower is better.
    """
    there = at[direction(metric) * (values - target) >= 0]
    return float(there[0]) if len(there) else NAN


def reached_by_all(runs: Iterable[RunFiles], column: str) -> float:
    """The value that all runs with this column reach: the worst of their best. NaN without any."""
    best = [value for run in runs if math.isfinite(value := _best(run, column)[0])]
    return min(best, key=lambda value: direction(column) * value, default=NAN)


def traffic(run: RunFiles) -> Floats:
    """(R,) bytes up and down of all clients from the start of the run to each round."""
    both = np.stack([run.series("bytes_up"), run.series("bytes_down")])
    known = np.isfinite(both).any(axis=0)
    return np.where(known, np.nansum(both, axis=0).cumsum(), np.nan)


def worst_tenth(values: Floats, metric: str) -> float:
    """The mean of the worst tenth (rounded up) of the finite values."""
    finite = np.sort(values[np.isfinite(values)])
    if not len(finite):
        return NAN
    few = math.ceil(len(finite) / 10)
    return float((finite[-few:] if lower_is_better(metric) else finite[:few]).mean())


def _is_mean(column: str, run: RunFiles) -> bool:
    """Whether a column is a metric of the whole run: not of a group, not a spread."""
    if not is_metric(column) or column in run.client_group_columns:
        return False
    return not is_spread(column, run.metrics)


def _best(run: RunFiles, column: str) -> tuple[float, int]:
    values = run.series(column)
    if not np.isfinite(values).any():
        return NAN, 0
    known = np.where(np.isfinite(values), values, np.nan)
    place = int(np.nanargmin(known) if lower_is_better(column) else np.nanargmax(known))
    return float(values[place]), int(run.rounds[place])


def _personal_std(run: RunFiles, metric: str) -> float:
    known = last(run.series(f"personal/{metric}_std"))
    values = _client_values(run, metric)
    return float(np.nanstd(values)) if math.isnan(known) and len(values) else known


def _personal_worst10(run: RunFiles, metric: str) -> float:
    known = last(run.series(f"personal/{metric}_worst10"))
    return worst_tenth(_client_values(run, metric), metric) if math.isnan(known) else known


def _client_values(run: RunFiles, metric: str) -> Floats:
    """The finite values of the last evaluation in the column of this name."""
    values = run.evaluation.values.get(metric) if run.evaluation else None
    return np.empty(0) if values is None else values[np.isfinite(values)]


def _client_groups(run: RunFiles, metric: str) -> tuple[ClientGroupOutcome, ...]:
    if run.evaluation is None:
        means = {name: last(run.series(f"personal/{metric}/{name}")) for name in run.client_groups}
        return tuple(
            ClientGroupOutcome(name=name, clients=NAN, mean=mean)
            for name, mean in means.items()
            if math.isfinite(mean)
        )
    members = np.array(run.evaluation.client_group)
    column = client_metric(run.evaluation, metric)
    return tuple(
        _client_group(name, run.evaluation, members == name, column)
        for name in run.client_groups
        if (members == name).any()
    )


def _client_group(
    name: str, evaluation: Evaluation, member: np.ndarray, metric: str | None
) -> ClientGroupOutcome:
    def mean(column: str | None) -> float:
        return _mean(_finite(evaluation, column, member))

    scores = _finite(evaluation, metric, member)
    costs: dict[str, Any] = {name: mean(name) for name in CLIENT_COSTS if name != "samples"}
    return ClientGroupOutcome(
        name=name,
        clients=float(member.sum()),
        mean=mean(metric),
        std=float(scores.std()) if len(scores) else NAN,
        worst10=worst_tenth(scores, metric or ""),
        local=mean(f"local/{metric}"),
        **costs,
    )


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else NAN


def _finite(evaluation: Evaluation, column: str | None, member: np.ndarray) -> Floats:
    values = evaluation.values.get(column or "")
    return np.empty(0) if values is None else values[member & np.isfinite(values)]
