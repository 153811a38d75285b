"""The fit loop of a federation.

An "epoch" is a round, a "batch" is a wave of sessions, one on every rank.

A wave count follows from the participants, so it is the same on every rank without communication,
and every stock callback that talks to other ranks from a batch hook stays in step. Firing batch
hooks per local step would hang as soon as two ranks have different numbers of batches.
"""

from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from typing_extensions import override

from lightfed.core._lightning import (
    _call_callback_hooks,
    _call_lightning_module_hook,
    _FitLoop,
    _TrainingEpochLoop,
    is_overridden,
)
from lightfed.core.session import PendingReport
from lightfed.core.training import RunClient

if TYPE_CHECKING:
    from lightfed.core.federation import Federation
    from lightfed.core.trainer import FederatedTrainer


_WAVE_HOOKS = ("on_train_batch_start", "on_train_batch_end")


class RoundLoop(_TrainingEpochLoop):
    """One round: the algorithm's `round`, whose training runs in waves, then validation.

    `global_step` counts server updates: it advances by one a round, on every rank alike.
    """

    trainer: "FederatedTrainer"

    def __init__(
        self, trainer: L.Trainer, min_steps: int | None = None, max_steps: int = -1
    ) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._server_steps = 0
        self.in_round = False

    @property
    @override
    def global_step(self) -> int:
        return self._server_steps

    @property
    def round_index(self) -> int:
        """T of the round under way."""
        return self.trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]

    @override
    def run(self, data_fetcher: Any = None) -> None:
        t = self.round_index
        self._batches_that_stepped = t
        federation: Federation = self.trainer.federation
        # A checkpoint written while round t was being validated comes back here with the server
        # already updated.
        if self._server_steps == t:
            self.in_round = True
            federation.run_round(t, self._waves, validates=self._should_check_val_epoch())
            self._server_steps += 1
            self.in_round = False
        if self._should_check_val_epoch():
            self._validate()
        # Only now: the loggers' x-axis of what validation logs is still this round.
        self._batches_that_stepped = t + 1
        self.trainer.save_deferred_checkpoints()

    def _waves(self, mine: list[int], waves: int, run: RunClient) -> list[PendingReport]:
        self.batch_progress.reset_on_run()
        self.trainer.fit_loop.max_batches = waves
        hooked = any(any(self._hooks(name)) for name in _WAVE_HOOKS)
        reports = []
        for wave in range(waves):
            client = mine[wave] if wave < len(mine) else None
            self.batch_progress.is_last_batch = wave == waves - 1
            report = self._wave(wave, client, run, hooked=hooked)
            if report is not None:
                reports.append(report)
        return reports

    def _wave(
        self, wave: int, client: int | None, run: RunClient, *, hooked: bool
    ) -> PendingReport | None:
        """One session on this rank, or none, between the stock batch hooks."""
        progress, connector = self.batch_progress, self.trainer._logger_connector
        progress.increment_ready()
        if hooked:
            connector.on_batch_start(client)
            self._call("on_train_batch_start", client, wave)
        progress.increment_started()
        report = None if client is None else run(client)
        progress.increment_processed()
        if hooked:
            self._call("on_train_batch_end", report, client, wave)
            connector.on_batch_end()
        progress.increment_completed()
        return report

    def _hooks(self, name: str) -> tuple[bool, bool]:
        """Whether a callback, and whether the root module, has more than the empty hook.

        Lightning calls them all; with a thousand sessions a second the empty ones add up.
        """
        callbacks = any(is_overridden(name, c, L.Callback) for c in self.trainer.callbacks)
        return callbacks, is_overridden(name, self.trainer.federation)

    def _call(self, name: str, *args: Any) -> None:
        callbacks, module = self._hooks(name)
        if callbacks:
            _call_callback_hooks(self.trainer, name, *args)
        if module:
            _call_lightning_module_hook(self.trainer, name, *args)

    def _validate(self) -> None:
        trainer = self.trainer
        trainer.validating = True
        first_iter = trainer._logger_connector._first_loop_iter
        self.val_loop.restarting = False
        self.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first_iter

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Nothing: a round sets its own learning rate, so that a resumed run has the same."""

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        return super().on_save_checkpoint() | {"server_steps": self._server_steps}

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._server_steps = state_dict["server_steps"]


class FederatedLoop(_FitLoop):
    """Rounds instead of epochs; no global train loader exists."""

    trainer: "FederatedTrainer"
    epoch_loop: RoundLoop

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        min_epochs: int | None,
        max_epochs: int | None,
        min_steps: int | None,
        max_steps: int,
    ) -> None:
        super().__init__(trainer, min_epochs, max_epochs)
        self.epoch_loop = RoundLoop(trainer, min_steps, max_steps)

    @override
    def _iteration_based_training(self) -> bool:
        # A step is a round: with max_steps, too, the epoch counter is the one to resume from.
        return False

    @override
    def setup_data(self) -> None:
        if self.trainer.limit_train_batches == 0:
            return
        if self.max_batches == float("inf"):
            self.max_batches = (
                1  # the waves of a round are known when it has drawn its participants
            )
        self.trainer.val_check_batch = float("inf")

    @override
    def on_advance_start(self) -> None:
        if self.restarted_mid_epoch or self.restarted_on_epoch_end:
            return
        if not self.restarted_on_epoch_start:
            self.epoch_progress.increment_ready()
        self.trainer.federation.set_learning_rate(self.epoch_loop.round_index)
        _call_callback_hooks(self.trainer, "on_train_epoch_start")
        _call_lightning_module_hook(self.trainer, "on_train_epoch_start")
        self.epoch_progress.increment_started()

    @override
    def advance(self) -> None:
        with self.trainer.profiler.profile("run_training_epoch"):
            self.epoch_loop.run()

    @override
    def _warn_if_modules_in_eval_mode(self) -> None:
        """Nothing: the modules of clients are switched by their sessions."""
