"""A Trainer with a run folder that holds its checkpoints."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT
from typing import Any, NoReturn, cast

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightfed.data.datamodule import FederatedDataModule
from lightfed.engine.checks import Clips
from lightfed.engine.session_setup import scheduled_settings, step_schedule
from lightfed.engine.strategy import FederatedStrategy
from lightfed.runs.checkpoint import main_file
from lightfed.runs.run_logger import RunLogger
from lightfed.runs.saving import NAME, LastCheckpoint
from lightfed.utils import signals
from lightfed.utils.errors import Exited, Interrupted, UserError, is_failure
from lightfed.utils.keys import digest, identity
from lightfed.utils.lightning_private import _PATH
from lightfed.utils.process import drop_output
from lightfed.utils.recorded import Recorded, arguments

log = logging.getLogger(__name__)


class RunTrainer(Recorded, L.Trainer):
    """What a federation's root module and loop need from a Trainer besides Lightning's API.

    Attributes:
        resumes_from: The checkpoint from which this run resumes, whether given or found.
        clipping: How gradients are clipped.
        limits: The limits on rounds and time, as given. Under other limits, a run that a callback
            has stopped goes on.
        step_callbacks: Callbacks that act on the steps of clients, and hear no rounds.
        in_round: Whether a round is running; checkpoints that are requested meanwhile wait for its
            end.
        pause_after: The round after which the run stops for now; None if it runs to its end.
    """

    callbacks: list[Callback]
    datamodule: Any
    profiler: Profiler
    resumes_from: _PATH | None = None
    clipping: Clips
    limits: dict[str, Any]
    step_callbacks: Sequence[Callback] = ()
    in_round: bool = False
    pause_after: int | None = None
    _config: dict[str, Any] | None = None
    _deferred_checkpoints: list[tuple[_PATH, bool | None, Any]]

    @property
    @override
    def strategy(self) -> FederatedStrategy:
        """The strategy, which is the only one that the Trainer accepts."""
        return cast(FederatedStrategy, super().strategy)

    @property
    def run_logger(self) -> RunLogger | None:
        """The logger that owns the run folder, if there is one."""
        return next((logger for logger in self.loggers if isinstance(logger, RunLogger)), None)

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration of the run, with the sections trainer, model and data.

        The command sets it. A run from a script gets it from the arguments of its objects.
        """
        if self._config is None:
            federation: Any = self.lightning_module
            self._config = {
                "trainer": arguments(self),
                "model": arguments(federation),
                "data": arguments(self.datamodule),
            }
        return self._config

    @config.setter
    def config(self, config: dict[str, Any]) -> None:
        self._config = config

    @property
    def last_checkpoint(self) -> LastCheckpoint | None:
        """The callback that writes the default checkpoint, if the run has it."""
        return next((c for c in self.callbacks if isinstance(c, LastCheckpoint)), None)

    def learning_rate(self, t: int) -> float | None:
        """Return the learning rate of round t; None if the modules configure their optimizers.

        The schedule is stepped up to that round, so that a resumed run has the same rates.
        """
        if not self.optimizers:
            return None

        # It trains nothing: it is the template that `session_setup.template` has made.
        template = self.optimizers[0]
        for config in self.lr_scheduler_configs:
            while config.scheduler.last_epoch < t:
                template.step()  # torch warns of schedules that step before their optimizer
                step_schedule(config.scheduler)
        return float(template.param_groups[0]["lr"])

    def scheduled_settings(self) -> dict[str, Any]:
        """Return what the schedule has set besides the rate, for the round of `learning_rate`."""
        if not self.lr_scheduler_configs:
            return {}
        return scheduled_settings(self.optimizers[0])

    @override
    def save_checkpoint(
        self, filepath: _PATH, weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; one requested during a round is written at its end."""
        if self.state.fn is not None and self.in_round:
            self._deferred_checkpoints.append((filepath, weights_only, storage_options))
            return
        with self.strategy.ranks.timings.part("checkpoint"):
            super().save_checkpoint(filepath, weights_only, storage_options)

    def save_deferred_checkpoints(self) -> None:
        """Write the checkpoints that callbacks requested during the round."""
        deferred = self._deferred_checkpoints
        self._deferred_checkpoints = []
        for filepath, weights_only, storage_options in deferred:
            self.save_checkpoint(filepath, weights_only, storage_options)

    def save_last(self) -> bool:
        """Write last.ckpt where resuming looks for it.

        Returns:
            False if the run keeps no checkpoints; then nothing is written.
        """
        folders = [Path(c.dirpath) for c in self._model_checkpoints() if c.dirpath is not None]
        if not folders:
            return False

        logger = self.run_logger
        folder = folders[0] if logger is None else logger.folder / "checkpoints"
        self.save_checkpoint(folder / NAME)
        return True

    def rounds(self, finished: int) -> str:
        """Return the progress of the run in words, such as "4 of 30 rounds"."""
        # There may be no limit on rounds, but on steps or on the time.
        if self.max_epochs is None or self.max_epochs <= 0:
            return f"{finished} rounds"
        return f"{finished} of {self.max_epochs} rounds"

    def interrupt(self, signal: int) -> NoReturn:
        """End the run after a round, with everything on disk.

        Args:
            signal: The number of the signal that has asked for it; `PAUSED` for `pause_after`.

        Raises:
            Interrupted: Always.
        """
        finished = self.rounds(self.current_epoch)
        last = self.last_checkpoint
        if last is not None:
            last.catch_up(self)
            resumable = True
        else:
            resumable = self.save_last()
        self.strategy.checkpoints.finish()
        raise Interrupted(signal, finished, resumable=resumable)

    @contextmanager
    def no_exit(self) -> Iterator[None]:
        """Turn an exit that a user's code asks for, before all is done, into an error.

        Without this a `sys.exit()` in a step would end a script with status 0, as if its work were
        done. An exit with another status keeps that status, and the command says in a line whose it
        is. A second Ctrl-C ends the script as it ends any command.

        Raises:
            Exited: The code has asked for an exit with status 0, or raised KeyboardInterrupt.
            SystemExit: The code has asked for another status, or a user has pressed Ctrl-C twice.
        """
        try:
            yield
        except SystemExit as leaving:
            cause = leaving.__context__
            if not isinstance(cause, KeyboardInterrupt):
                if not is_failure(leaving):
                    raise Exited.by(leaving, when=self._moment) from leaving
                leaving.add_note(self._moment)
                raise

            # Lightning has made this exit of a KeyboardInterrupt. While a run trains, the first
            # Ctrl-C is recorded, so without that record it was not a user who interrupted it.
            if self.state.fn == TrainerFn.FITTING and signals.asked() != SIGINT:
                raise Exited.by(cause, when=self._moment) from cause
            raise

    @property
    def _moment(self) -> str:
        """The present moment of the run in words, for errors."""
        if self.state.fn != TrainerFn.FITTING:
            return "before the end of the evaluation"
        return f"after {self.rounds(self.current_epoch)}"

    def _resolve(self, ckpt_path: _PATH | None, *, fresh: bool = False) -> _PATH | None:
        """Return the file of a checkpoint to load; None for a new run.

        Args:
            ckpt_path: As given to `fit` or an evaluation: a path, `last`, `best`, or None.
            fresh: Whether a new run may begin if `last` finds nothing, as in `fit`.

        Raises:
            UserError: There is no such checkpoint.
        """
        logger = self.run_logger
        if fresh and logger is not None:
            # A job that is started again goes on with what it has begun. The checkpoint of its
            # command line was that of its first start.
            requeued = ckpt_path is not None and ckpt_path != "last"
            checkpoint_of_job = logger.place.resume_job(requeued=requeued)
            if checkpoint_of_job is not None:
                return checkpoint_of_job

        if ckpt_path is None:
            return None
        if ckpt_path == "best" and any(c.best_model_path for c in self._model_checkpoints()):
            return ckpt_path  # Lightning knows its path
        if ckpt_path != "last":
            path = main_file(ckpt_path)
            return path if logger is None else logger.place.resume_from(path)

        if logger is None:
            return ckpt_path  # Lightning looks into the folders of the checkpoint callbacks
        newest = logger.place.resume_newest(trains=fresh)
        if newest is None and not fresh:
            found = "`last`, but no run of this name has a checkpoint"
            raise UserError("ckpt_path", found, "give the path of a .ckpt file")
        return newest

    def _check_launch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a launch that cannot work, before ranks start or wait for each other.

        A run without a name gets one here, from what it runs.

        Args:
            args: The arguments of `fit` or an evaluation by position.
            kwargs: Those by name.

        Raises:
            UserError: The ranks cannot run. It names the flag, or the variable of the launcher.
        """
        federation, data = self._federation_and_data(args, kwargs)
        # A module that is no Federation is refused later, with a line of its own.
        clients = getattr(federation, "num_clients", None)
        self.strategy.check_launch(self.num_nodes, clients)

        logger = self.run_logger
        if logger is None or clients is None or not isinstance(data, FederatedDataModule):
            return
        place = logger.place
        if place.config is None:
            # The run is that of a script, without a configuration file to know it by.
            sections: dict[str, Any] = {
                "trainer": arguments(self),
                "model": arguments(federation),
                "data": arguments(data),
            }
            place.script = digest(identity(sections))
        method = type(federation.algorithm).__name__
        place.method = method
        logger.name_run(method, data.dataset.name, f"s{federation.seed}")

    def _federation_and_data(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Return the federation and the data among the arguments of `fit` or an evaluation.

        The federation is the first argument, or `model`, or that of the last call. The data is the
        first other argument, if there is one.
        """
        federation = args[0] if args else kwargs.get("model") or self.lightning_module
        others = [*args[1:], *(value for name, value in kwargs.items() if name != "model")]
        data = next((value for value in others if value is not None), None)
        return federation, data

    def _check_first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments of `fit` that it cannot use.

        Args:
            args: The arguments by position.
            kwargs: Those by name.

        Raises:
            UserError: The data is no FederatedDataModule, or the Federation has run elsewhere.
        """
        federation, data = self._federation_and_data(args, kwargs)
        if not isinstance(data, FederatedDataModule):
            raise UserError(
                key="data",
                found="missing" if data is None else f"a {type(data).__name__}",
                fix="give FederatedDataModule(data, partition), with FromTorch(train, test) for "
                "data sets",
            )

        has_run = hasattr(federation, "fleet") or self.current_epoch > 0
        if has_run and federation is not self.lightning_module:
            found = "a Federation that has run, or a second one for this Trainer"
            raise UserError("model", found, "make a new Federation and a new FederatedTrainer")

    def _is_finished(self) -> bool:
        """Whether this job has already finished the run, so that nothing is left to do.

        A script may want the state of a finished run. For a script the state is loaded, without
        running a round.
        """
        logger = self.run_logger
        if logger is None:
            return False
        rounds = logger.place.finished_rounds(self.limits)
        if rounds is None:
            return False

        if logger.place.config is None:
            self.fit_loop.max_epochs = rounds  # fewer than max_epochs if a callback stopped it
            return False
        if self.is_global_zero:
            print(f"{logger.folder} is finished after {rounds} rounds")
        return True

    def summarize(self, folder: Path) -> None:
        """Present a finished run; called on rank 0. By default it is not presented.

        Args:
            folder: The run folder, with all its files written.
        """

    def _conclude(self, logger: RunLogger) -> None:
        """Record that training is finished, and present the run.

        A failure is only a warning, because no result is lost.
        """
        try:
            logger.place.finish(self.current_epoch, self.limits)
            self.summarize(logger.folder)
        except (OSError, UserError) as error:
            drop_output("\n")  # standard output may be what cannot be written
            rounds = self.current_epoch
            log.warning("training has finished after %d rounds; afterwards: %s", rounds, error)

    def _model_checkpoints(self) -> list[ModelCheckpoint]:
        """Return the callbacks that write checkpoints, the default one included."""
        return [c for c in self.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
