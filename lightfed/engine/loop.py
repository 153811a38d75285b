"""The fit loop of a federation.

An "epoch" is a round, a "batch" is a wave of sessions, one on every rank.

The participants determine the number of waves. So it is the same on every rank without
communication, and stock callbacks that communicate in a batch hook stay in step. Firing batch hooks
per local step would hang as soon as two ranks have different numbers of batches.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from typing_extensions import override

from lightfed.engine.round_report import RoundMessages
from lightfed.engine.run_trainer import RunTrainer
from lightfed.federation import federation_of
from lightfed.local.finished import Suspended
from lightfed.local.local_work import RoundPlan
from lightfed.local.rank_sessions import Pending, RunClient
from lightfed.runs import checkpoint
from lightfed.runs.checkpoint import JOURNAL
from lightfed.utils import lightning_private
from lightfed.utils.errors import Interrupted, NoEnd, UserError
from lightfed.utils.lightning_private import _call_callback_hooks, call_overridden, overriding

_WAVE_HOOKS = ("on_train_batch_start", "on_train_batch_end")


class RoundLoop(lightning_private._TrainingEpochLoop):
    """One round: the algorithm's `round`, whose training runs in waves, then validation.

    `global_step` counts server updates: it advances by one per round, on every rank.
    """

    trainer: RunTrainer

    def __init__(self, trainer: L.Trainer, max_steps: int) -> None:
        super().__init__(trainer, max_steps=max_steps)
        self._server_steps = 0
        self._evaluated = 0  # rounds that were finished at the last evaluation
        self._first: int | None = None  # round of this process
        self._journal: Path | None = None  # of this run, until its first round ends
        self.messages: RoundMessages

    @property
    @override
    def global_step(self) -> int:
        return self._server_steps

    @property
    def round_index(self) -> int:
        """The current round t."""
        return self.trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]

    @override
    def run(self, data_fetcher: Any = None) -> None:
        t = self.round_index
        self._batches_that_stepped = t
        federation = federation_of(self.trainer)
        # A checkpoint written during the validation of round t resumes here with the server already
        # updated.
        if self._server_steps == t:
            plan = self._begin(t)
            try:
                validates = self._should_check_val_epoch()
                federation.run_round(t, plan, self._waves, validates=validates)
            except Suspended as suspended:
                self._suspend(suspended, t, plan)
            self._server_steps += 1
            self.trainer.in_round = False
        if self._should_check_val_epoch():
            self._validate()
        # Not earlier: validation must log at this round on the loggers' x-axis.
        self._batches_that_stepped = t + 1
        self.trainer.save_deferred_checkpoints()

    def _begin(self, t: int) -> RoundPlan:
        """Prepare a round: it may be suspended, or resume a suspended one."""
        self.trainer.in_round = True
        last = self.trainer.last_checkpoint
        lr = self.trainer.learning_rate(t)
        scheduled = self.trainer.scheduled_settings()
        plan = RoundPlan(lr, suspends=last is not None and last.rounds == t, scheduled=scheduled)
        if self._first is None:
            self._first = t
            plan = self._unfinished(t, plan)
            if last is not None:  # of any round
                self._journal = last.path.with_name(JOURNAL)
        return plan

    def _unfinished(self, t: int, plan: RoundPlan) -> RoundPlan:
        """A round's plan with the sessions that the previous run has finished."""
        path, federation = self.trainer.ckpt_path, federation_of(self.trainer)
        if path is None:
            return plan
        ranks, identity = federation.fleet.ranks, federation.round_identity(plan.lr)
        try:
            path = Path(path).with_name(JOURNAL)
            found = checkpoint.load_journal(path, ranks, t=t, identity=identity)
        except UserError as error:
            federation.fleet.warn(f"{error.found}: the sessions of round {t} are trained again")
            return plan
        return plan if found is None else replace(plan, call=found[0], known=found[1])

    def forget_journal(self) -> None:
        """Remove the journal: its round has a checkpoint, or is of another course of the run."""
        path, last = self._journal, self.trainer.last_checkpoint
        if path is None or (last is not None and last.rounds != self.global_step):
            return
        self._journal, strategy = None, self.trainer.strategy
        if strategy.ranks.any(path.is_file()):
            strategy.checkpoints.finish()
        if self.trainer.is_global_zero:
            checkpoint.remove(path)

    def _suspend(self, suspended: Suspended, t: int, plan: RoundPlan) -> None:
        """Save the finished sessions next to the round's checkpoint; raises Interrupted."""
        federation, last = federation_of(self.trainer), self.trainer.last_checkpoint
        assert last is not None, "a round is suspended only if its start is on disk"
        self.trainer.strategy.checkpoints.finish()
        ranks, identity = federation.fleet.ranks, federation.round_identity(plan.lr)
        path = last.path.with_name(JOURNAL)
        checkpoint.save_journal(suspended, path, ranks, t=t, identity=identity)
        saved = f"{self.trainer.rounds(t)} and {suspended} of the next"
        progressed = suspended.new > 0 or t != self._first
        raise Interrupted(self.messages.asked(), saved, resumable=True, progressed=progressed)

    def _waves(self, mine: list[int], waves: int, run: RunClient) -> list[Pending]:
        """Run this rank's sessions, each between the stock batch hooks."""
        self.batch_progress.reset_on_run()
        self.trainer.fit_loop.max_batches = max(1, waves)  # with 0 Lightning would end the run
        if not any(any(overriding(name, self.trainer)) for name in _WAVE_HOOKS):
            self._count(waves)
            every = [*map(run, mine)]
            return [report for report in every if report is not None]
        connector, reports = self.trainer._logger_connector, []
        for wave in range(waves):
            client = mine[wave] if wave < len(mine) else None  # others have more sessions
            self.batch_progress.is_last_batch = wave == waves - 1
            self.batch_progress.increment_ready()
            connector.on_batch_start(client)
            call_overridden("on_train_batch_start", self.trainer, client, wave)
            self.batch_progress.increment_started()
            report = None if client is None else run(client)
            self.batch_progress.increment_processed()
            call_overridden("on_train_batch_end", self.trainer, report, client, wave)
            connector.on_batch_end()
            self.batch_progress.increment_completed()
            if report is not None:
                reports.append(report)
        return reports

    def _count(self, waves: int) -> None:
        """Count all waves at once; at a thousand sessions per second single ones add up."""
        self.batch_progress.is_last_batch = True
        for tracker in (self.batch_progress.total, self.batch_progress.current):
            tracker.ready += waves
            tracker.started += waves  # type: ignore[attr-defined]
            tracker.processed += waves  # type: ignore[attr-defined]
            tracker.completed += waves

    @override
    def _should_check_val_epoch(self) -> bool:
        last = self.round_index + 1 in (self.trainer.max_epochs, self.trainer.max_steps)
        return super()._should_check_val_epoch() or (last and self.trainer.enable_validation)

    def validate_last(self) -> None:
        """Evaluate at the end of a run that a callback has stopped between two evaluations."""
        trainer = self.trainer
        if self._evaluated == self._server_steps or not trainer.enable_validation:
            return
        self._batches_that_stepped -= 1  # still of the last round
        self._validate()
        self._batches_that_stepped += 1
        if trainer.last_checkpoint is not None:
            trainer.last_checkpoint.save(trainer)

    def _validate(self) -> None:
        trainer = self.trainer
        trainer.validating = True
        first_iter = trainer._logger_connector._first_loop_iter
        self.val_loop.restarting = False
        federation = federation_of(trainer)
        with federation.fleet.ranks.timings.part("evaluation"):
            self.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first_iter
        self._evaluated = self._server_steps

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Do nothing: each round sets its learning rate, so that a resumed run has the same."""

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        counts = {"server_steps": self._server_steps, "evaluated": self._evaluated}
        over = self._server_steps == self.round_index and self.trainer.fit_loop._can_stop_early
        stops = {"stopped": str(self.trainer.limits)} if over and self.trainer.should_stop else {}
        return super().on_save_checkpoint() | counts | stops

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._server_steps = state_dict["server_steps"]
        self._evaluated = state_dict["evaluated"]
        self.trainer.should_stop |= state_dict.get("stopped") == str(self.trainer.limits)


class FederatedLoop(lightning_private._FitLoop):
    """Rounds instead of epochs; no global train loader exists."""

    trainer: RunTrainer
    epoch_loop: RoundLoop

    def __init__(self, trainer: L.Trainer) -> None:
        """Take the place of the trainer's own loop, with its limits."""
        stock = trainer.fit_loop
        super().__init__(trainer, stock.min_epochs, stock.max_epochs)
        self.epoch_loop = RoundLoop(trainer, stock.max_steps)

    @override
    def _iteration_based_training(self) -> bool:
        # A step is a round: with max_steps, too, the epoch counter is the one to resume from.
        return False

    @property
    @override
    def skip(self) -> bool:
        # A run that died between its last round and its end must still finish.
        return self.trainer.limit_train_batches == 0

    @override
    def setup_data(self) -> None:
        if self.trainer.limit_train_batches == 0:
            return
        if self.max_batches == float("inf"):
            self.max_batches = 1  # a round knows its waves once it has drawn its participants
        self.trainer.val_check_batch = float("inf")

    @override
    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            # Before callbacks: one that saves would wait for ranks that do not know of the error.
            self.trainer.strategy.on_exception(error)
            raise

    @override
    def on_advance_start(self) -> None:
        if self.restarted_mid_epoch or self.restarted_on_epoch_end:
            return
        if not self.restarted_on_epoch_start:
            self.epoch_progress.increment_ready()
        self.trainer.learning_rate(self.epoch_loop.round_index)  # for callbacks
        with NoEnd("the start of a round"):
            _call_callback_hooks(self.trainer, "on_train_epoch_start")
            lightning_private._call_lightning_module_hook(self.trainer, "on_train_epoch_start")
        self.epoch_progress.increment_started()

    @override
    def advance(self) -> None:
        with self.trainer.profiler.profile("run_training_epoch"), NoEnd("a round"):
            self.epoch_loop.run()

    @override
    def on_advance_end(self) -> None:
        with NoEnd("the end of a round"):
            super().on_advance_end()
        self.epoch_loop.forget_journal()
        signal = self.epoch_loop.messages.round_ends()
        if signal and not self.done:
            self.epoch_loop.messages.run_ends()
            self.trainer.interrupt(signal)

    @override
    def on_run_start(self) -> None:
        super().on_run_start()
        ranks = self.trainer.strategy.ranks
        ranks.messages = self.epoch_loop.messages = RoundMessages(self.trainer)

    @override
    def on_run_end(self) -> None:
        self.epoch_loop.validate_last()
        if self.trainer.last_checkpoint is not None:
            self.trainer.last_checkpoint.catch_up(self.trainer)
        self.epoch_loop.forget_journal()
        self.trainer.strategy.checkpoints.finish()
        self.epoch_loop.messages.run_ends()
        super().on_run_end()

    @override
    def _warn_if_modules_in_eval_mode(self) -> None:
        """Do nothing: sessions switch the modes of their clients' modules."""
