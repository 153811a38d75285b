"""Reports a round to callbacks, progress bars, loggers and tables, and to the other ranks."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor

from lightfed.api.fleet import Fleet
from lightfed.engine.evaluation import Evaluation
from lightfed.engine.run_trainer import RunTrainer
from lightfed.local.session import Report
from lightfed.runs.environment import environment
from lightfed.runs.run_table import Row
from lightfed.utils import signals
from lightfed.utils.errors import reason
from lightfed.utils.stopwatch import PARTS, Part

log = logging.getLogger(__name__)

# The metrics on progress bars, by the name that they have there.
_SHOWN = {
    "loss": "train_loss",
    "global/accuracy": "global/accuracy",
    "personal/accuracy": "personal/accuracy",
}


class RoundReport:
    """Collects the metrics of the current round, and passes them on.

    Attributes:
        metrics: The metrics by name, already reduced over the ranks. They are in checkpoints,
            because a round may have been trained but not yet validated.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._evaluated: set[str] = set()  # the names of the metrics of the last evaluation
        self._started = 0.0

    def begin(self, trainer: RunTrainer, fleet: Fleet, evaluation: Evaluation) -> None:
        """Report the start of a run: its configuration to loggers, its environment to its folder.

        A run that is resumed with nothing left to do says so.
        """
        finished_rounds = trainer.current_epoch
        if trainer.run_logger is not None and trainer.is_global_zero:
            described = environment(fleet, trainer, evaluation=evaluation)
            trainer.run_logger.start(described, finished_rounds=finished_rounds)
        fleet.ranks.timings.take()  # the time of the start is no part of the first round

        for logger in trainer.loggers:
            try:
                logger.log_hyperparams(trainer.config)
            except Exception as error:  # whatever a library of a logger raises
                if logger is trainer.run_logger or trainer.resumes_from is None:
                    raise
                # MLflow, for example, keeps the parameters with which its run began: a run that
                # goes on with more rounds sends another value of trainer.max_epochs.
                log.warning(
                    "%s still shows the configuration with which the run began: %s",
                    type(logger).__name__, reason(error),
                )  # fmt: skip

        if trainer.is_global_zero:
            _note_nothing_to_do(trainer, finished_rounds)

    def start(self) -> None:
        """Begin to measure the time of a round."""
        self._started = time.monotonic()

    def trained(
        self, trainer: L.Trainer, metrics: dict[str, float], *, manually: bool = False
    ) -> None:
        """Take the metrics of a round that has been trained, instead of those of the last one.

        Args:
            trainer: The Trainer of the run.
            metrics: The metrics by name.
            manually: Whether clients optimize manually, in which case they need not return a loss.
        """
        self.metrics = metrics
        has_trained = manually or "train_loss" in metrics
        if trainer.current_epoch == 0 and trainer.is_global_zero and not has_trained:
            log.warning("round 0 trains nothing: no session returns a loss")
        self._show(trainer)

    def end(self, trainer: RunTrainer, fleet: Fleet) -> None:
        """Log the round. This precedes its checkpoint, so that every one has its row."""
        t = trainer.current_epoch
        _publish(trainer, self.metrics)
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=t)

        if trainer.run_logger is not None:
            # These depend on the machine, and are not part of the promise of equal bits.
            of_this_machine = {
                "wire_bytes": fleet.ranks.take_wire_bytes(),
                "seconds": time.monotonic() - self._started,
            }
            trainer.run_logger.log_metrics(of_this_machine, t)
            trainer.run_logger.end_round(t + 1)

    def evaluated(
        self,
        trainer: RunTrainer,
        fleet: Fleet,
        metrics: dict[str, float],
        reports: Mapping[str, Sequence[Report]],
        arrays: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """Add the results of an evaluation.

        Args:
            trainer: The Trainer of the run.
            fleet: The clients.
            metrics: The metrics by name.
            reports: The reports of clients, by kind of evaluation.
            arrays: What the algorithm writes to files, by file and name.
        """
        # A group that was not tested must not keep the metric of an earlier evaluation.
        for name in self._evaluated - metrics.keys():
            trainer.callback_metrics.pop(name, None)
        self._evaluated = set(metrics)

        _publish(trainer, metrics)
        self.metrics |= metrics
        self._show(trainer)

        rounds = trainer.global_step
        if trainer.run_logger is not None:
            trainer.run_logger.log_clients(_client_rows(fleet, reports, rounds=rounds))
            sums = torch.from_numpy(_group_sums(fleet))
            trainer.run_logger.log_arrays(rounds, {**arrays, "costs": {"sums": sums}})
        if rounds == trainer.current_epoch:
            # The evaluation comes after the end of the round, whose other metrics are written.
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=rounds - 1)

    def _show(self, trainer: L.Trainer) -> None:
        """Show metrics on progress bars, which are drawn before the round's end is logged."""
        shown = trainer.progress_bar_metrics
        shown.pop("loss", None)  # this round may have no sessions
        for name, metric in _SHOWN.items():
            if metric in self.metrics:
                shown[name] = self.metrics[metric]


def _note_nothing_to_do(trainer: RunTrainer, finished_rounds: int) -> None:
    """Say so if the run has nothing to do, and how it would go on."""
    reached_limit = 0 < (trainer.max_epochs or 0) <= finished_rounds
    if not reached_limit and not trainer.should_stop:
        return

    run = trainer.resumes_from or "the run"
    if reached_limit:
        progress = f"{run} has finished its {finished_rounds} rounds"
        limits = "trainer.max_epochs"
    else:
        progress = f"{run} was stopped after {finished_rounds} rounds"
        limits = "trainer.max_epochs or max_time"
    print(f"{progress}; give a larger {limits} to continue training")


def exact(metrics: dict[str, float]) -> dict[str, Tensor]:
    """Return metrics as scalar tensors of float64; Lightning rounds plain numbers to float32."""
    values = torch.tensor(list(metrics.values()), dtype=torch.float64).unbind()
    return dict(zip(metrics, values, strict=True))


def _publish(trainer: L.Trainer, metrics: dict[str, float]) -> None:
    """Pass metrics to callbacks; `self.log` would cost a millisecond per metric."""
    trainer.callback_metrics.update(exact(metrics))


def _client_rows(
    fleet: Fleet, reports: Mapping[str, Sequence[Report]], *, rounds: int
) -> list[Row]:
    """Return the rows of clients.csv, one per client, all with the same columns.

    Metrics of the kind `personal` keep their names; those of other kinds are named `kind/name`.

    Args:
        fleet: The clients.
        reports: The reports of their tests, by kind of evaluation.
        rounds: The number of finished rounds.
    """
    metrics_of: dict[int, dict[str, float]] = {}
    # Test samples and stored bytes are those of the client's own model, if it was tested.
    costs_of: dict[int, Report] = {}
    for kind, reports_of_kind in reports.items():
        # Of two kinds with a column, `personal` is the one that it does not name.
        prefix = f"{kind}/".replace("personal/", "")
        for report in reports_of_kind:
            metrics = metrics_of.setdefault(report.client, {})
            for name, value in report.metrics.items():
                metrics[prefix + name] = value
            if kind == "personal" or report.client not in costs_of:
                is_test = report.split == "test"
                costs_of[report.client] = report if is_test else replace(report, samples=0)

    # A client may lack some metrics. None has the name of another column: `log` refuses those.
    names = list(dict.fromkeys(name for metrics in metrics_of.values() for name in metrics))

    clients = sorted(metrics_of)
    bytes_of_clients = fleet.ledger.bytes[clients].tolist()
    flops_of_clients = fleet.ledger.flops[clients].tolist()
    devices_of_clients = _of_devices(fleet, clients)
    rows: list[Row] = []
    for position, client in enumerate(clients):
        bytes_up, bytes_down = bytes_of_clients[position]
        row: Row = {
            "round": rounds,
            "client": client,
            "group": fleet.groups[fleet.home_group(client)].name,
            "samples": costs_of[client].samples,
        }
        for name in names:
            row[name] = metrics_of[client].get(name, "")
        row["bytes_up"] = bytes_up
        row["bytes_down"] = bytes_down
        row["flops"] = flops_of_clients[position]
        row["stored_bytes"] = costs_of[client].stored
        row |= devices_of_clients[position]
        rows.append(row)
    return rows


def _group_sums(fleet: Fleet) -> np.ndarray:
    """Return the costs of each group's clients since the start, as (groups, 3) of float64.

    The columns are bytes up, bytes down and FLOPs. Bytes are summed as whole numbers, and rounded
    once.
    """
    first_clients = []
    clients = 0
    for state in fleet.groups:
        first_clients.append(clients)
        clients += state.group.count

    sums_of_bytes = np.add.reduceat(fleet.ledger.bytes, first_clients)
    sums_of_flops = np.add.reduceat(fleet.ledger.flops, first_clients)
    return np.column_stack([sums_of_bytes, sums_of_flops])


def _of_devices(fleet: Fleet, clients: Sequence[int]) -> list[dict[str, float]]:
    """Return virtual seconds and joules of each client since the start, as far as it has them."""
    rows: list[dict[str, float]] = [{} for _ in clients]
    times = fleet.clock.times()
    if times is not None:
        for row, (busy, idle) in zip(rows, times[clients].tolist(), strict=True):
            row |= {"busy_time": busy, "idle_time": idle}

    joules = fleet.clock.joules()
    if joules is not None:
        for row, spent in zip(rows, joules[clients].tolist(), strict=True):
            row["joules"] = spent
    return rows


class Message(NamedTuple):
    """What a rank tells the others.

    Attributes:
        signal: The last signal that it has received; 0 for none.
        failed: Whether its checkpoint could not be written.
        seconds: How long the parts of its last round took; empty if that is reported already.
    """

    signal: int
    failed: bool
    seconds: dict[Part, float]


class RoundMessages:
    """What this rank tells the others, and what they have told it.

    Messages travel with the gathers of the rounds, so that they cost no collective of their own.
    The times of a round travel with the next gather, which is in the next round: nobody waits for
    others at the end of a round. A signal that a rank receives after the last gather of a round is
    seen by all ranks in the next round, whose sessions it suspends.
    """

    def __init__(self, trainer: RunTrainer) -> None:
        self._trainer = trainer
        self._seconds: dict[Part, float] = {}  # of a round that is not reported yet
        self._rounds = 0  # the number of rounds that were finished with it
        self._messages: list[Message] = []  # of all ranks, at the last gather of this round

    def outgoing(self) -> Message:
        """Return what this rank sends with a gather."""
        return Message(
            signal=signals.asked() or 0,
            failed=self._trainer.strategy.checkpoints.failed,
            seconds=self._seconds,
        )

    def receive(self, messages: list[Message]) -> None:
        """Take the messages of all ranks, and log the times of the round that they have finished.

        The times of its parts are means over the ranks, which add up to the round's duration.
        """
        self._messages = messages
        logger = self._trainer.run_logger
        if logger is not None and self._seconds:
            means: dict[Part, float] = {}
            for part in PARTS:
                total = sum(message.seconds[part] for message in messages)
                means[part] = total / len(messages)
            logger.log_timings(self._rounds, means)
        self._seconds = {}

    def round_ends(self) -> int:
        """Note the times of a round, for the next gather.

        Returns:
            As for `asked`.
        """
        ranks = self._trainer.strategy.ranks
        if not self._messages:
            ranks.gather([])  # nothing has been gathered in this round, so signals are not known

        self._rounds = self._trainer.current_epoch
        self._seconds = ranks.timings.take()
        if ranks.alone:
            ranks.gather([])  # nobody has to wait: a single rank reports at once
        return self.asked()

    def asked(self) -> int:
        """Return the signal that a rank had received at the round's last gather; 0 for none.

        All ranks get the same answer.

        Raises:
            DiskError: A rank could not write its checkpoint.
        """
        messages = self._messages
        self._messages = []
        if any(message.failed for message in messages):
            self._trainer.strategy.checkpoints.finish()
        return max(message.signal for message in messages)

    def run_ends(self) -> None:
        """Report the times of the last round."""
        if self._seconds:
            self._trainer.strategy.ranks.gather([])
