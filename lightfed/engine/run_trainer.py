"""A Trainer with a run folder that holds its checkpoints."""

import logging
import sys
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
from lightfed.lab.results.run import Run, read
from lightfed.runs.checkpoint import main_file
from lightfed.runs.run_logger import RunLogger
from lightfed.runs.saving import NAME, LastCheckpoint
from lightfed.utils import signals
from lightfed.utils.errors import Exited, Interrupted, UserError, is_failure, require
from lightfed.utils.keys import digest, identity
from lightfed.utils.lightning_private import _PATH
from lightfed.utils.process import drop_output
from lightfed.utils.recorded import Recorded, arguments

log = logging.getLogger(__name__)


class RunTrainer(Recorded, L.Trainer):
    """What a federation's root module and loop need from a Trainer besides Lightning's API.

    Attributes:
        resumes_from: the checkpoint from which this run resumes, given or found.
        clipping: how gradients are clipped.
        limits: on rounds and time, as given; under others a stopped run goes on.
        step_callbacks: those that act on the steps of clients, and hear no rounds.
        in_round: whether a round is running; requested checkpoints wait for its end.
    """

    callbacks: list[Callback]
    datamodule: Any
    profiler: Profiler
    resumes_from: _PATH | None = None
    clipping: Clips
    in_round: bool = False
    _config: dict[str, Any] | None = None
    limits: dict[str, Any]
    step_callbacks: Sequence[Callback] = ()
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
        """The run's tables: `rounds`, and `clients` with a row a client and evaluation."""
        logger = self.run_logger
        if logger is None or not logger.claimed:
            raise UserError("trainer.logger", "no run folder to read", "call fit with logger=True")
        return read(logger.folder)

    @property
    def last_checkpoint(self) -> LastCheckpoint | None:
        """The default checkpoint, if the run has it."""
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

    def scheduled_settings(self) -> dict[str, Any]:
        """What the schedule has set for the round of the last `learning_rate` besides the rate."""
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
        deferred, self._deferred_checkpoints = self._deferred_checkpoints, []
        for filepath, weights_only, storage_options in deferred:
            self.save_checkpoint(filepath, weights_only, storage_options)

    def save_last(self) -> bool:
        """Write last.ckpt where resuming looks for it; False if the run keeps no checkpoints."""
        folders = [Path(c.dirpath) for c in self._model_checkpoints() if c.dirpath is not None]
        logger = self.run_logger
        if folders:
            self.save_checkpoint((logger.folder / "checkpoints" if logger else folders[0]) / NAME)
        return bool(folders)

    def rounds(self, finished: int) -> str:
        """The progress of the run, in words."""
        limit = self.max_epochs or -1  # no limit: there may be max_steps
        return f"{finished} of {limit} rounds" if limit > 0 else f"{finished} rounds"

    def interrupt(self, signal: int) -> NoReturn:
        """End the run after a round, with everything on disk; raises Interrupted."""
        finished, last = self.rounds(self.current_epoch), self.last_checkpoint
        if last is not None:
            last.catch_up(self)
        resumable = last is not None or self.save_last()
        self.strategy.checkpoints.finish()
        raise Interrupted(signal, finished, resumable=resumable)

    @contextmanager
    def no_exit(self) -> Iterator[None]:
        """Report an exit that a user's code asks for, before all is done; see `Exited`.

        Without this a `sys.exit()` in a step would end a script with status 0. Another status stays
        that of the script, and the command says in a line whose it is. A second Ctrl-C ends it as
        it does any command.
        """
        try:
            yield
        except SystemExit as leaving:
            interrupt = leaving.__context__
            if not isinstance(interrupt, KeyboardInterrupt):
                if is_failure(leaving):
                    leaving.add_note(self._moment)
                    raise
                raise Exited.by(leaving, when=self._moment) from leaving
            # Lightning has turned the interrupt into this exit.
            if self.state.fn == TrainerFn.FITTING and signals.asked() != SIGINT:
                raise Exited.by(interrupt, when=self._moment) from interrupt
            raise

    @property
    def _moment(self) -> str:
        """When something happens, in words."""
        if self.state.fn != TrainerFn.FITTING:
            return "before the end of the evaluation"
        return f"after {self.rounds(self.current_epoch)}"

    def _resolve(self, ckpt_path: _PATH | None, *, fresh: bool = False) -> _PATH | None:
        """The file of a checkpoint, or a UserError; with `fresh`, `last` may start a new run."""
        logger = self.run_logger
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
            return main if logger is None else logger.place.resume_from(main)
        if logger is None:
            return ckpt_path  # Lightning looks into the folders of the checkpoint callbacks
        newest = logger.place.resume_newest(trains=fresh)
        if newest is None and not fresh:
            found = "`last`, but no run of this name has a checkpoint"
            raise UserError("ckpt_path", found, "give the path of a .ckpt file")
        return newest

    def _check_launch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Reject a launch that cannot work, before ranks start or wait for each other.

        A run without a name gets one from what it runs. The first of the arguments of `fit` or an
        evaluation is the Federation, or it is `model`. A UserError names the flag, or the
        launcher's variable.
        """
        federation, data = self._parts(args, kwargs)
        clients = getattr(federation, "num_clients", None)  # another module is rejected later
        self.strategy.check_launch(self.num_nodes, clients)
        known = clients is not None and isinstance(data, FederatedDataModule)
        if known and self.run_logger is not None:
            place = self.run_logger.place
            if place.config is None:
                owners: dict[str, Any] = {"trainer": self, "model": federation, "data": data}
                described = {name: arguments(one) for name, one in owners.items()}
                place.script = digest(identity(described))
            method = place.method = type(federation.algorithm).__name__
            self.run_logger.name_run(method, data.dataset.name, f"s{federation.seed}")

    def _parts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """The federation and the data among the arguments of `fit` or an evaluation."""
        federation = args[0] if args else kwargs.get("model") or self.lightning_module
        given = [*args[1:], *(x for name, x in kwargs.items() if name != "model")]
        return federation, next((x for x in given if x is not None), None)

    def _check_first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Reject arguments of `fit`: other data, or a Federation that has run elsewhere."""
        federation, data = self._parts(args, kwargs)
        found = "missing" if data is None else f"a {type(data).__name__}"
        fix = "give FederatedDataModule(data, partition), with FromTorch(train, test) for data sets"
        require(isinstance(data, FederatedDataModule), "data", found, fix)
        known = federation is self.lightning_module
        found = "a Federation that has run, or a second one for this Trainer"
        fits = known or not (hasattr(federation, "fleet") or self.current_epoch)
        require(fits, "model", found, "make a new Federation and a new FederatedTrainer")

    def _is_finished(self) -> bool:
        """Whether this job has already finished the run.

        A script may want the state of a finished run: it is loaded without running a round.
        """
        logger = self.run_logger
        rounds = None if logger is None else logger.place.finished_rounds(self.limits)
        if logger is None or rounds is None:
            return False
        if logger.place.config is None:
            self.fit_loop.max_epochs = rounds  # fewer than max_epochs if a callback stopped it
            return False
        if self.is_global_zero:
            print(f"{logger.folder} is finished after {rounds} rounds")
        return True

    def _conclude(self, logger: RunLogger, *, page: bool) -> None:
        """Record that training is finished, make the page and print a summary.

        A failure is a warning: nothing is lost.
        """
        try:
            logger.place.finish(self.current_epoch, self.limits)
            if page:
                from lightfed.lab.report.page import (  # pandas takes half a second
                    build,
                    print_summary,
                )

                build(logger.folder)
                print_summary(logger.folder)
                sys.stdout.flush()
        except (OSError, UserError) as error:
            drop_output("\n")  # standard output may be what cannot be written
            log.warning("training is finished after %d rounds; %s", self.current_epoch, error)

    def _model_checkpoints(self) -> list[ModelCheckpoint]:
        return [c for c in self.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
