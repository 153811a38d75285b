"""A Trainer with a run folder that holds its checkpoints."""

from collections.abc import Mapping, Sequence
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
from lightfed.engine.strategy import FederatedStrategy
from lightfed.local.session_setup import step_schedule
from lightfed.results.run import Run, read
from lightfed.runs.checkpoint import main_file, newest_file
from lightfed.runs.last_checkpoint import NAME, LastCheckpoint
from lightfed.runs.run_logger import RunLogger
from lightfed.utils.atomic_io import check_like, check_numbers, checked
from lightfed.utils.errors import Interrupted, UserError
from lightfed.utils.lightning_private import _PATH, _CheckpointConnector, _SignalConnector
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
        finished, last = self.rounds(self.current_epoch), self.last_checkpoint
        if last is not None:
            last.catch_up(self)
        resumable = last is not None or self.save_last()
        self.strategy.checkpoints.finish()
        raise Interrupted(signal, finished, resumable=resumable)

    def _interrupted(self, ended: Interrupted | SystemExit) -> Interrupted:
        """The interruption itself, or that by a second Ctrl-C, for which Lightning exits at once.

        Raises:
            SystemExit: the given one, if it has another cause.
        """
        if isinstance(ended, Interrupted):
            return ended
        if not isinstance(ended.__context__, KeyboardInterrupt):
            raise ended
        last = self.last_checkpoint
        finished = self.rounds(self.current_epoch if last is None else last.rounds)
        written = last is not None and last.dirpath is not None and newest_file(last.path)
        return Interrupted(SIGINT, finished, resumable=bool(written))

    def _resolve(self, ckpt_path: _PATH | None, *, fresh: bool = False) -> _PATH | None:
        """The file of a checkpoint; with `fresh`, `last` may start a new run.

        Raises:
            UserError: there is no such checkpoint.
        """
        logger = self.run_logger
        self.strategy.checkpoints.strict = False
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
            self.strategy.checkpoints.strict = True  # an explicit path has no fallback
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

        A run without a name gets one from what it runs.

        Args:
            args: of `fit` or an evaluation; the first is the Federation.
            kwargs: likewise, or it is `model`.

        Raises:
            UserError: names the flag, or the launcher's variable.
        """
        federation = args[0] if args else kwargs.get("model") or self.lightning_module
        clients = getattr(federation, "num_clients", None)  # another module is rejected later
        self.strategy.check_launch(self.num_nodes, clients)
        given = (*args[1:], *kwargs.values())
        data = next((one for one in given if isinstance(one, FederatedDataModule)), None)
        if clients is not None and data is not None and self.run_logger is not None:
            method = type(federation.algorithm).__name__
            self.run_logger.name_run(method, data.dataset.name, f"s{federation.seed}")

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


class Restores(_CheckpointConnector):
    """Reports what a checkpoint lacks, or holds in another form, in one line."""

    @override
    def resume_start(self, *args: Any, **kwargs: Any) -> None:
        super().resume_start(*args, **kwargs)
        with checked(self._ckpt_path):
            if found := self._loaded_checkpoint:
                lists: dict[str, Any] = {"optimizer_states": [], "lr_schedulers": []}
                loops = {"fit_loop": self.trainer.fit_loop.state_dict()}
                example = {"epoch": 0, "global_step": 0, "loops": loops, **lists}
                check_like(found, example, "checkpoint")

    @override
    def _restore_modules_and_callbacks(self, *args: Any, **kwargs: Any) -> None:
        with checked(self._ckpt_path):
            super()._restore_modules_and_callbacks(*args, **kwargs)
            if self._loaded_checkpoint and self.trainer.state.fn == TrainerFn.FITTING:
                self._try_optimizers(self._loaded_checkpoint)

    def _try_optimizers(self, found: Mapping[str, Any]) -> None:
        """Load the states of optimisers and schedules into objects of their own.

        Lightning loads them after files of the run are written.
        """
        made = self.trainer.lightning_module.configure_optimizers()
        optimizers, schedules = made if isinstance(made, tuple) else ([made] if made else [], [])
        states = found["optimizer_states"]
        for optimizer, state in zip(optimizers, states, strict=True):
            check_numbers(state, optimizer.state_dict(), "optimizer_states")
            optimizer.load_state_dict(state)
        for schedule, state in zip(schedules, found["lr_schedulers"], strict=False):
            check_like(
                state, dict.fromkeys({"last_epoch"} & vars(schedule).keys()), "lr_schedulers"
            )
            check_numbers(state, schedule.state_dict(), "lr_schedulers")
            schedule.load_state_dict(state)

    @override
    def restore_training_state(self) -> None:
        with checked(self._ckpt_path):
            super().restore_training_state()
