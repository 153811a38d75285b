"""What a round says: to callbacks, progress bars, loggers and tables, and to the other ranks."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor

from lightfed.api.fleet import Fleet
from lightfed.engine.evaluation import Evaluation, Kind
from lightfed.engine.run_trainer import RunTrainer
from lightfed.local.session import Report
from lightfed.runs.environment import environment
from lightfed.runs.run_table import Row
from lightfed.state.costs import Ledger
from lightfed.utils import signals
from lightfed.utils.errors import reason
from lightfed.utils.stopwatch import PARTS, Part

log = logging.getLogger(__name__)

_COSTS = ("samples", "stored_bytes")  # of a client, written with its metrics
# Names on progress bars, and the metrics that they show.
_SHOWN = {"loss": "train_loss"} | {name: name for name in ("global/accuracy", "personal/accuracy")}


class RoundReport:
    """The metrics of the current round by name; all are reduced over the ranks already.

    They are in checkpoints: a round may be trained but not yet validated.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._evaluated: set[str] = set()  # names of the last evaluation's metrics
        self._started = 0.0

    def begin(self, trainer: RunTrainer, fleet: Fleet, evaluation: Evaluation) -> None:
        """Pass the configuration to loggers, and the run's environment to its folder."""
        rounds = trainer.current_epoch
        if trainer.run_logger is not None and trainer.is_global_zero:
            described = environment(fleet, trainer, evaluation=evaluation)
            trainer.run_logger.start(described, finished_rounds=rounds)
        fleet.ranks.timings.take()  # the start is no part of the first round
        for logger in trainer.loggers:
            try:
                logger.log_hyperparams(trainer.config)
            except Exception as error:  # whatever a library of a logger raises
                if logger is trainer.run_logger or trainer.resumes_from is None:
                    raise
                # MLflow, for example, keeps the parameters with which its run began: a run that
                # goes on with more rounds sends another value of trainer.max_epochs.
                log.warning(
                    "%s keeps the configuration that it had before: %s",
                    type(logger).__name__, reason(error),
                )  # fmt: skip
        over = 0 < (trainer.max_epochs or 0) <= rounds
        if (over or trainer.should_stop) and trainer.is_global_zero:
            ended = "has finished its" if over else "was stopped after"
            fix = f"give a larger trainer.max_epochs{'' if over else ' or max_time'} to train on"
            print(f"{trainer.resumes_from or 'the run'} {ended} {rounds} rounds; {fix}")

    def start(self) -> None:
        """Measure the time of a round from now on."""
        self._started = time.monotonic()

    def trained(
        self, trainer: L.Trainer, metrics: dict[str, float], *, manually: bool = False
    ) -> None:
        """Replace the metrics by those of a round that is trained.

        Clients that optimise `manually` need not return a loss.
        """
        self.metrics = metrics
        known = manually or "train_loss" in metrics
        if not trainer.current_epoch and trainer.is_global_zero and not known:
            log.warning("round 0 trains nothing: no session has a loss to minimise")
        self._show(trainer)

    def end(self, trainer: RunTrainer, fleet: Fleet) -> None:
        """Log the round, before its checkpoint: every one with a checkpoint has its row."""
        t = trainer.current_epoch
        _publish(trainer, self.metrics)
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=t)
        if trainer.run_logger is not None:
            # Depends on the machine; not part of the promise of equal bits.
            sent = fleet.ranks.take_wire_bytes()
            local = {"wire_bytes": sent, "seconds": time.monotonic() - self._started}
            trainer.run_logger.log_metrics(local, t)
            trainer.run_logger.end_round(t + 1)

    def evaluated(
        self,
        trainer: RunTrainer,
        fleet: Fleet,
        metrics: dict[str, float],
        reports: Mapping[Kind, Sequence[Report]],
        arrays: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """Add the metrics of an evaluation, reports of clients by kind, arrays by file and name."""
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
            # (groups, 3) bytes up, bytes down and FLOPs of each group's clients since the start
            ends = np.cumsum([0] + [state.group.count for state in fleet.groups])
            sums = torch.from_numpy(_group_sums(fleet.ledger, ends[:-1]))
            trainer.run_logger.log_arrays(rounds, {**arrays, "costs": {"sums": sums}})
        if rounds == trainer.current_epoch:  # the round's other metrics are written
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=rounds - 1)

    def _show(self, trainer: L.Trainer) -> None:
        """Show metrics on progress bars, which run before the round's end is logged."""
        shown = trainer.progress_bar_metrics
        shown.pop("loss", None)  # this round may have no sessions
        found = self.metrics
        shown.update({name: found[key] for name, key in _SHOWN.items() if key in found})


def exact(metrics: dict[str, float]) -> dict[str, Tensor]:
    """Metrics as tensors that keep all digits; Lightning would round plain numbers to float32."""
    values = torch.tensor(list(metrics.values()), dtype=torch.float64).unbind()
    return dict(zip(metrics, values, strict=True))


def _publish(trainer: L.Trainer, metrics: dict[str, float]) -> None:
    """Pass metrics to callbacks; `self.log` would cost a millisecond per metric."""
    trainer.callback_metrics.update(exact(metrics))


def _client_rows(
    fleet: Fleet, reports: Mapping[Kind, Sequence[Report]], *, rounds: int
) -> list[Row]:
    """Rows of clients.csv, one per client, with the same columns.

    The metrics of `personal` keep their names, those of others become `kind/name`. `rounds` are
    finished.
    """
    found: dict[int, Row] = {}
    for kind, tests in reports.items():
        prefix = "" if kind == "personal" else f"{kind}/"
        for report in tests:
            row = found.setdefault(report.client, {})
            row |= {prefix + name: value for name, value in report.metrics.items()}
            if kind == "personal" or "samples" not in row:
                row["samples"], row["stored_bytes"] = report.samples, report.stored
    clients = sorted(found)
    names = [n for n in dict.fromkeys(n for row in found.values() for n in row) if n not in _COSTS]
    groups = [state.name for state in fleet.groups]
    return [
        {
            "round": rounds,
            "client": client,
            "group": groups[fleet.home_group(client)],
            "samples": row["samples"],
            **{name: row.get(name, "") for name in names},
            "bytes_up": up,
            "bytes_down": down,
            "flops": flops,
            "stored_bytes": row["stored_bytes"],
            **times,
        }
        for client, (up, down), flops, times in zip(
            clients,
            fleet.ledger.bytes[clients].tolist(),
            fleet.ledger.flops[clients].tolist(),
            _times(fleet, clients),
            strict=True,
        )
        for row in (found[client],)
    ]


def _group_sums(ledger: Ledger, starts: np.ndarray) -> np.ndarray:
    """(groups, 3) float64 sums over the clients of groups, whose first clients are `starts`.

    Bytes are summed as whole numbers, and rounded once.
    """
    sent = np.add.reduceat(ledger.bytes, starts)
    return np.column_stack([sent, np.add.reduceat(ledger.flops, starts)])


def _times(fleet: Fleet, clients: Sequence[int]) -> list[dict[str, float]]:
    """Virtual seconds of each client since the start; nothing without devices."""
    times = fleet.clock.times()
    if times is None:
        return [{} for _ in clients]
    return [{"busy_time": busy, "idle_time": idle} for busy, idle in times[clients].tolist()]


class Message(NamedTuple):
    """Of a rank: its last signal, or 0; whether its checkpoint failed; parts of a round."""

    signal: int
    failed: bool
    seconds: dict[Part, float]


class RoundMessages:
    """What this rank says to the others, and what they have said.

    The times of a round go with the next gather, in the next round: nobody waits at the end of one.
    A signal after a round's last gather is seen by all in the next round, whose sessions it
    suspends.
    """

    def __init__(self, trainer: RunTrainer) -> None:
        self._trainer = trainer
        self._seconds: dict[Part, float] = {}  # of a round that is not reported yet
        self._round = 0  # its number
        self._said: list[Message] = []  # at the last gather of this round

    def outgoing(self) -> Message:
        """What goes with a gather."""
        failed = self._trainer.strategy.checkpoints.failed
        return Message(signals.asked() or 0, failed, self._seconds)

    def receive(self, said: list[Message]) -> None:
        """Note what all ranks have said, and log the round that they have finished.

        Its parts are means over the ranks; they add up to the round's duration.
        """
        self._said, logger = said, self._trainer.run_logger
        if logger is not None and self._seconds:
            means = {p: sum(rank.seconds[p] for rank in said) / len(said) for p in PARTS}
            logger.log_timings(self._round, means)
        self._seconds = {}

    def round_ends(self) -> int:
        """Report a round with the next gather; as `asked`."""
        ranks = self._trainer.strategy.ranks
        if not self._said:  # nothing was gathered in this round
            ranks.gather([])
        self._round = self._trainer.current_epoch
        self._seconds = ranks.timings.take()
        if ranks.alone:  # nobody has to wait
            ranks.gather([])
        return self.asked()

    def asked(self) -> int:
        """The signal that a rank had received at the round's last gather, or 0; on all ranks alike.

        A DiskError if a checkpoint could not be written.
        """
        said, self._said = self._said, []
        if any(rank.failed for rank in said):
            self._trainer.strategy.checkpoints.finish()
        return max(rank.signal for rank in said)

    def run_ends(self) -> None:
        """Report the last round."""
        if self._seconds:
            self._trainer.strategy.ranks.gather([])
