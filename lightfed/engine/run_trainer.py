"""A Trainer with a run folder that holds its checkpoints."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import lightning.pytorch as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from lightfed.engine.checks import Clips
from lightfed.engine.progress import RoundProgressBar
from lightfed.engine.strategy import FederatedStrategy
from lightfed.local.session_setup import step_schedule
from lightfed.results.run import Run, read
from lightfed.runs.checkpoint import main_file
from lightfed.runs.last_checkpoint import NAME, LastCheckpoint
from lightfed.runs.run_logger import RunLogger
from lightfed.utils.errors import Interrupted, UserError, require
from lightfed.utils.lightning_private import _PATH, _SignalConnector
from lightfed.utils.recorded import Recorded, arguments


class RunTrainer(Recorded, L.Trainer):
    """What a federation's root module and loop need from a Trainer besides Lightning's API.

    Attributes:
        resumes_from: the checkpoint from which this run resumes, given or found.
        clipping: how gradients are clipped.
        in_round: whether a round is running; requested checkpoints wait for its end.
    """

    callbacks: list[Callback]
    datamodule: Any
    profiler: Profiler
    resumes_from: _PATH | None = None
    clipping: Clips
    in_round: bool = False
    _config: dict[str, Any] | None = None
    _deferred_checkpoints: list[tuple[_PATH, bool | None, Any]]

    @property
    @override
    def strategy(self) -> FederatedStrategy:
        """The only one that the Trainer accepts."""
        return cast(FederatedStrategy, super().strategy)

    @property
    def run_logger(self) -> RunLogger | None:
        """The logger that owns the run folder, if there is one."""
        return next((x for x in self.loggers if isinstance(x, RunLogger)), None)

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration of the run, with sections trainer, model and data."""
        if self._config is None:
            owners = {"trainer": self, "model": self.lightning_module, "data": self.datamodule}
            self._config = {name: arguments(owner) for name, owner in owners.items()}
        return self._config

    @config.setter
    def config(self, config: dict[str, Any]) -> None:
        self._config = config

    @property
    def results(self) -> Run:
        """The run folder's tables: `rounds`, and `clients` with a row a client and evaluation.

        Raises:
            UserError: the run has no folder.
        """
        logger = self.run_logger
        if logger is None or not logger.claimed:
            raise UserError("trainer.logger", "no run folder to read", "call fit with logger=True")
        return read(logger.folder)

    @property
    def last_checkpoint(self) -> LastCheckpoint | None:
        """The default checkpoint, written after every round, if the run has it."""
        return next((c for c in self.callbacks if isinstance(c, LastCheckpoint)), None)

    def learning_rate(self, t: int) -> float | None:
        """The learning rate of round t, for its hooks too; None without an optimizer.

        The schedule is stepped up to that round, so that a resumed run has the same.
        """
        if not self.optimizers:
            return None
        for config in self.lr_scheduler_configs:
            while config.scheduler.last_epoch < t:
                self.optimizers[0].step()  # the template has no gradient; torch requires this order
                step_schedule(config.scheduler)
        return float(self.optimizers[0].param_groups[0]["lr"])

    @override
    def save_checkpoint(
        self, filepath: _PATH, weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; one requested during a round is written at its end."""
        if self.state.fn is not None and self.in_round:
            self._deferred_checkpoints.append((filepath, weights_only, storage_options))
            return
        super().save_checkpoint(filepath, weights_only, storage_options)

    def save_deferred_checkpoints(self) -> None:
        """Write the checkpoints that callbacks requested during the round."""
        deferred, self._deferred_checkpoints = self._deferred_checkpoints, []
        for filepath, weights_only, storage_options in deferred:
            self.save_checkpoint(filepath, weights_only, storage_options)

    def save_last(self) -> bool:
        """Write last.ckpt where resuming looks for it; False if the run keeps no checkpoints."""
        folders = [c.dirpath for c in self._model_checkpoints() if c.dirpath is not None]
        if not folders:
            return False
        logger = self.run_logger
        folder = Path(folders[0]) if logger is None else logger.folder / "checkpoints"
        self.save_checkpoint(folder / NAME)
        return True

    def rounds(self, finished: int) -> str:
        """The progress of the run, in words."""
        limit = self.max_epochs or -1  # no limit: there may be max_steps
        return f"{finished} of {limit} rounds" if limit > 0 else f"{finished} rounds"

    def interrupt(self, signal: int) -> NoReturn:
        """End the run after a round, with everything on disk.

        Raises:
            Interrupted: always.
        """
        finished = self.rounds(self.current_epoch)
        resumable = self.last_checkpoint is not None or self.save_last()
        raise Interrupted(signal, finished, resumable=resumable)

    def _resolve(self, ckpt_path: _PATH | None, *, fresh: bool = False) -> _PATH | None:
        """The file of a checkpoint; with `fresh`, `last` may start a new run.

        Raises:
            UserError: there is no such checkpoint.
        """
        logger = self.run_logger
        self.strategy.strict = False
        if fresh and logger is not None:
            own = logger.place.resume_job(requeued=ckpt_path not in (None, "last"))
            if own is not None:
                return own
        if ckpt_path is None:
            return None
        if ckpt_path == "best" and any(c.best_model_path for c in self._model_checkpoints()):
            return ckpt_path
        if ckpt_path != "last":
            main = main_file(ckpt_path)
            self.strategy.strict = True  # an explicit path has no fallback
            return main if logger is None else logger.place.resume_from(main)
        if logger is None:
            return ckpt_path  # Lightning looks into the folders of the checkpoint callbacks
        newest = logger.place.resume_newest(trains=fresh)
        if newest is None and not fresh:
            found = "`last`, but no run of this name has a checkpoint"
            raise UserError("ckpt_path", found, "give the path of a .ckpt file")
        return newest

    def _model_checkpoints(self) -> list[ModelCheckpoint]:
        return [c for c in self.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


class FlagSignals(_SignalConnector):
    """Leaves signals to lightfed.utils.signals, which only records them.

    Lightning's handlers save and broadcast, which deadlocks if the signal interrupts a collective.
    Here the loop checks between sessions, all ranks stop at the same one and save, and `fit`
    requeues the job.
    """

    @override
    def register_signal_handlers(self) -> None:
        self.received_sigterm = False

    @override
    def teardown(self) -> None:
        pass


# Callbacks that change the steps, batches or weights of a single training loop.
_IDLE = (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)


def with_folder(given: Logger | Iterable[Logger] | bool, folder: RunLogger | None) -> list[Logger]:
    """A user's loggers, and that of the run folder first unless it is among them.

    Args:
        given: as to the Trainer; False for no logger at all.
        folder: None if the run has none.
    """
    loggers: list[Logger] = []
    if not isinstance(given, bool):
        loggers = [given] if isinstance(given, Logger) else list(given)
    own = any(isinstance(logger, RunLogger) for logger in loggers)
    return loggers if own or folder is None or given is False else [folder, *loggers]


def with_defaults(
    callbacks: list[Callback] | Callback | None,
    loggers: Sequence[Logger],
    *,
    progress: bool,
    checkpoint: bool,
    max_time: str | timedelta | dict[str, int] | None,
) -> list[Callback]:
    """A user's callbacks, and those that a run has by default unless they are among them."""
    given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
    for callback in given:
        idle, found = isinstance(callback, _IDLE), type(callback).__name__
        require(not idle, "trainer.callbacks", f"{found} has no effect on sessions", "remove it")
    if progress and not any(isinstance(c, ProgressBar) for c in given):
        given.append(RoundProgressBar())
    if checkpoint and not any(_is_found(c, loggers) for c in given):
        given.append(LastCheckpoint())
    if max_time is not None and not any(isinstance(c, Timer) for c in given):
        # Lightning's version synchronises the ranks after every wave, so fast ranks would wait.
        given.append(Timer(max_time, interval="epoch"))
    return given


def _is_found(callback: Callback, loggers: Sequence[Logger]) -> bool:
    """Whether a user's callback keeps a last.ckpt where resuming looks for it."""
    if not (isinstance(callback, ModelCheckpoint) and callback.save_last):
        return False
    if not any(isinstance(logger, RunLogger) for logger in loggers):
        return True  # Lightning looks into the folders of callbacks
    return callback.dirpath is None and isinstance(loggers[0], RunLogger)
