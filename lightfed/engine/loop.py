"""The fit loop of a federation: rounds instead of epochs, waves of sessions instead of batches.

In a wave, every rank trains one of its clients, if it has one left. The participants of a round
determine the number of waves, so all ranks know it without communication, and callbacks of
Lightning that communicate in a batch hook stay in step. If batch hooks were called for every local
step instead, the ranks would hang as soon as two of them had different numbers of batches.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as L
from typing_extensions import override

from lightfed.engine.round_module import federation_of
from lightfed.engine.round_report import RoundMessages
from lightfed.engine.run_trainer import RunTrainer
from lightfed.local.finished import Suspended
from lightfed.local.local_work import RoundPlan
from lightfed.local.rank_sessions import RunClient
from lightfed.local.session import SessionReport
from lightfed.runs import checkpoint
from lightfed.runs.checkpoint import JOURNAL
from lightfed.utils import lightning_private
from lightfed.utils.errors import PAUSED, Interrupted, NoEnd, UserError
from lightfed.utils.lightning_private import _call_callback_hooks, call_overridden, overriding

_WAVE_HOOKS = ("on_train_batch_start", "on_train_batch_end")


class RoundLoop(lightning_private._TrainingEpochLoop):
    """One round: the algorithm's `round`, whose training runs in waves, then validation.

    `global_step` counts server updates. It advances by one per round, on every rank.

    Attributes:
        messages: What the ranks tell each other in a round; there from the start of the run.
    """

    trainer: RunTrainer
    messages: RoundMessages

    def __init__(self, trainer: L.Trainer, max_steps: int) -> None:
        super().__init__(trainer, max_steps=max_steps)
        self._server_steps = 0
        self._rounds_evaluated = 0  # the rounds that were finished at the last evaluation
        self._first_round: int | None = None  # the first round that this process runs
        self._journal: Path | None = None  # the journal of this run, until its first round ends

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
        # Lightning takes this number for the loggers' x-axis.
        self._batches_that_stepped = t

        # A checkpoint that was written during the validation of round t resumes here, with a server
        # that has already been updated.
        if self._server_steps == t:
            self._train(t)
        if self._should_check_val_epoch():
            self._validate()

        # Not earlier, so that the validation logs at this round.
        self._batches_that_stepped = t + 1
        self.trainer.save_deferred_checkpoints()

    def _train(self, t: int) -> None:
        """Run the algorithm's round t; raises Interrupted if a signal has suspended it."""
        # Checkpoints that are requested from here on wait for the end of the round.
        self.trainer.in_round = True
        plan = self._plan(t)
        try:
            federation_of(self.trainer).run_round(
                t, plan, self._run_waves, validates=self._should_check_val_epoch()
            )
        except Suspended as suspended:
            self._suspend(suspended, t, plan)
        self._server_steps += 1
        self.trainer.in_round = False

    def _plan(self, t: int) -> RoundPlan:
        """Decide about round t: whether it may be suspended, and what it need not train again."""
        last = self.trainer.last_checkpoint
        plan = RoundPlan(
            lr=self.trainer.learning_rate(t),
            # Sessions are of use later only if the state from which they started is on disk.
            suspends=last is not None and last.rounds == t,
            scheduled=self.trainer.scheduled_settings(),
        )
        if self._first_round is not None:
            return plan

        self._first_round = t
        plan = self._with_known_sessions(plan, t)
        if last is not None:
            self._journal = last.path.with_name(JOURNAL)
        return plan

    def _with_known_sessions(self, plan: RoundPlan, t: int) -> RoundPlan:
        """Add to the plan of round t the sessions that the previous process has finished."""
        ckpt_path = self.trainer.ckpt_path
        if ckpt_path is None:
            return plan

        federation = federation_of(self.trainer)
        ranks = federation.fleet.ranks
        identity = federation.round_identity(plan.lr)
        try:
            path = Path(ckpt_path).with_name(JOURNAL)
            journal = checkpoint.load_journal(path, ranks, t=t, identity=identity)
        except UserError as error:
            # Nothing is lost but time: the round begins from its checkpoint.
            federation.fleet.warn(f"{error.found}: the sessions of round {t} are trained again")
            return plan
        if journal is None:
            return plan
        call, known = journal
        return replace(plan, call=call, known=known)

    def forget_journal(self) -> None:
        """Remove the journal once its round has a checkpoint.

        The journal may also be left from another course of the run, whose round is never resumed.
        """
        path = self._journal
        last = self.trainer.last_checkpoint
        if path is None:
            return
        if last is not None and last.rounds != self.global_step:
            return  # no checkpoint has this round yet

        self._journal = None
        strategy = self.trainer.strategy
        if strategy.ranks.any(path.is_file()):
            # The checkpoint may still be in writing. Until it is on disk, the journal is needed.
            strategy.checkpoints.finish()
        if self.trainer.is_global_zero:
            checkpoint.remove(path)

    def _suspend(self, suspended: Suspended, t: int, plan: RoundPlan) -> NoReturn:
        """Save the finished sessions beside the checkpoint of the round's start.

        Raises:
            Interrupted: Always.
        """
        last = self.trainer.last_checkpoint
        assert last is not None, "a round is suspended only if its start is on disk"
        self.trainer.strategy.checkpoints.finish()

        federation = federation_of(self.trainer)
        identity = federation.round_identity(plan.lr)
        path = last.path.with_name(JOURNAL)
        ranks = federation.fleet.ranks
        checkpoint.save_journal(suspended, path, ranks, t=t, identity=identity)

        raise Interrupted(
            self.messages.asked(),
            f"{self.trainer.rounds(t)} and {suspended} of the next",
            resumable=True,
            progressed=suspended.new > 0 or t != self._first_round,
        )

    def _run_waves(
        self, clients: list[int], waves: int, run_client: RunClient
    ) -> list[SessionReport]:
        """Run this rank's sessions, each between the batch hooks of Lightning.

        Args:
            clients: This rank's clients, in the order of their sessions.
            waves: The largest number of sessions of any rank.
            run_client: Runs the session of a client; None if a signal asks the run to stop.

        Returns:
            The reports of the sessions that have run.
        """
        self.batch_progress.reset_on_run()
        self.trainer.fit_loop.max_batches = max(1, waves)  # with 0 Lightning would end the run

        if not any(any(overriding(name, self.trainer)) for name in _WAVE_HOOKS):
            # Nobody listens. At a thousand sessions per second, calling empty hooks and counting
            # each wave would take a noticeable part of a round.
            self._count(waves)
            every = [run_client(client) for client in clients]
            return [report for report in every if report is not None]

        reports: list[SessionReport] = []
        connector = self.trainer._logger_connector
        for wave in range(waves):
            # Without a client of its own left, a rank calls the hooks all the same: those of other
            # ranks may communicate.
            client = clients[wave] if wave < len(clients) else None

            self.batch_progress.is_last_batch = wave == waves - 1
            self.batch_progress.increment_ready()
            connector.on_batch_start(client)
            call_overridden("on_train_batch_start", self.trainer, client, wave)
            self.batch_progress.increment_started()

            report = None if client is None else run_client(client)

            self.batch_progress.increment_processed()
            call_overridden("on_train_batch_end", self.trainer, report, client, wave)
            connector.on_batch_end()
            self.batch_progress.increment_completed()
            if report is not None:
                reports.append(report)
        return reports

    def _count(self, waves: int) -> None:
        """Count all waves of a round at once, as Lightning would count them one by one."""
        self.batch_progress.is_last_batch = True
        for tracker in (self.batch_progress.total, self.batch_progress.current):
            tracker.ready += waves
            tracker.started += waves  # type: ignore[attr-defined]
            tracker.processed += waves  # type: ignore[attr-defined]
            tracker.completed += waves

    @override
    def _should_check_val_epoch(self) -> bool:
        if super()._should_check_val_epoch():
            return True
        rounds = self.round_index + 1
        is_last = rounds in (self.trainer.max_epochs, self.trainer.max_steps)
        return is_last and self.trainer.enable_validation

    def validate_last(self) -> None:
        """Evaluate at the end of a run that a callback has stopped between two evaluations."""
        trainer = self.trainer
        if self._rounds_evaluated == self._server_steps or not trainer.enable_validation:
            return

        # Log the metrics at the last round, which is over by now.
        self._batches_that_stepped -= 1
        self._validate()
        self._batches_that_stepped += 1

        # The checkpoint of the last round does not have these metrics yet.
        if trainer.last_checkpoint is not None:
            trainer.last_checkpoint.save(trainer)

    def _validate(self) -> None:
        """Run Lightning's validation loop, as its own training loop does."""
        trainer = self.trainer
        trainer.validating = True
        first_iter = trainer._logger_connector._first_loop_iter
        self.val_loop.restarting = False
        with federation_of(trainer).fleet.ranks.timings.part("evaluation"):
            self.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first_iter
        self._rounds_evaluated = self._server_steps

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Do nothing: each round sets its learning rate, so that a resumed run has the same."""

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state = super().on_save_checkpoint()
        state["server_steps"] = self._server_steps
        state["evaluated"] = self._rounds_evaluated

        # A run that a callback has stopped stays stopped when it is resumed with the same limits.
        round_is_over = self._server_steps == self.round_index
        if round_is_over and self.trainer.fit_loop._can_stop_early and self.trainer.should_stop:
            state["stopped"] = str(self.trainer.limits)
        return state

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._server_steps = state_dict["server_steps"]
        self._rounds_evaluated = state_dict["evaluated"]
        if state_dict.get("stopped") == str(self.trainer.limits):
            self.trainer.should_stop = True


class FederatedLoop(lightning_private._FitLoop):
    """Lightning's fit loop with rounds instead of epochs, and without a loader for training."""

    trainer: RunTrainer
    epoch_loop: RoundLoop

    def __init__(self, trainer: L.Trainer) -> None:
        """Take the place of the Trainer's own loop, with the same limits."""
        stock_loop = trainer.fit_loop
        super().__init__(trainer, stock_loop.min_epochs, stock_loop.max_epochs)
        self.epoch_loop = RoundLoop(trainer, stock_loop.max_steps)

    @override
    def _iteration_based_training(self) -> bool:
        # A step is a round: with max_steps, too, the epoch counter is the one to resume from.
        return False

    @property
    @override
    def skip(self) -> bool:
        # Lightning also skips a run that has done all of its rounds. Here one that died between its
        # last round and its end must still finish.
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
            # Tell the other ranks before callbacks hear of it: one that saves a checkpoint would
            # wait for ranks that do not know of the error.
            self.trainer.strategy.on_exception(error)
            raise

    @override
    def on_advance_start(self) -> None:
        if self.restarted_mid_epoch or self.restarted_on_epoch_end:
            return
        if not self.restarted_on_epoch_start:
            self.epoch_progress.increment_ready()
        # Callbacks may read the rate of the round in the hooks of its start.
        self.trainer.learning_rate(self.epoch_loop.round_index)
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
        if self.done:
            return
        if signal:
            self.epoch_loop.messages.run_ends()
            self.trainer.interrupt(signal)
        self._pause()

    def _pause(self) -> None:
        """Stop for now if the run has done the rounds after which it is to pause.

        Raises:
            Interrupted: It has.
        """
        last_round = self.trainer.pause_after
        if last_round is not None and self.trainer.current_epoch >= last_round:
            self.epoch_loop.messages.run_ends()
            self.trainer.interrupt(PAUSED)

    @override
    def on_run_start(self) -> None:
        super().on_run_start()
        messages = RoundMessages(self.trainer)
        self.epoch_loop.messages = messages
        self.trainer.strategy.ranks.messages = messages  # they travel with its gathers
        if not self.done:
            self._pause()  # a run that is resumed may have these rounds already

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
