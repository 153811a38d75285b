"""The Trainer that a client's module and callbacks see in a session: `self.trainer`.

To a module, a session is a Lightning fit of one client. So the steps and epochs that this Trainer
counts, its optimizers and its progress are those of the session. Everything else, such as loggers,
the run folder or the number of this process, is taken from the Trainer of the run.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightfed.lightning_fits.hook_table import split
from lightfed.utils.errors import UserError, reason
from lightfed.utils.lightning_private import (
    _call_callback_hooks,
    _call_configure_model,
    _call_lightning_module_hook,
    _DataHookSelector,
    _LoggerConnector,
    is_overridden,
)
from lightfed.utils.process import silenced


@dataclass(slots=True)
class Position:
    """Where a session is; what `self.trainer` says about steps and epochs follows from it.

    Attributes:
        active: Whether a session is under way, or its optimizers are being configured.
        first: The number of steps that the client has taken in its earlier sessions.
        batch: The number of the current batch in the session, from 0.
        epoch_batches: The number of batches of a local epoch.
        total: The number of batches of the session.
    """

    active: bool = False
    first: int = 0
    batch: int = 0
    epoch_batches: int = 1
    total: int = 1

    def begin(self, *, first: int, epoch_batches: int, total: int) -> None:
        """Begin the session of a client; the arguments are as the attributes."""
        self.active = True
        self.batch = 0
        self.first = first
        self.expect(epoch_batches, total)

    def expect(self, epoch_batches: int, total: int) -> None:
        """Set the length of a session, perhaps before there is one."""
        # A session may end within its first epoch, and may be empty.
        self.epoch_batches = max(1, min(epoch_batches, total))
        self.total = total

    @property
    def epochs(self) -> int:
        """The number of local epochs, of which the last may be shorter."""
        return -(-self.total // self.epoch_batches)


@dataclass(frozen=True)
class SessionHost:
    """What the sessions of all groups get from the run.

    Attributes:
        run: The Trainer of the run; None in a federation without one.
        device: The device of this rank.
        callbacks: Callbacks that act on the steps of clients.
        datamodule: What modules see as `self.trainer.datamodule`.
        transfers: The user's LightningDataModule, whose transfer hooks are called; None for none.
        stage: What `setup` and `teardown` are told: fit, validate, test or predict.
    """

    run: L.Trainer | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    callbacks: Sequence[Callback] = ()
    datamodule: Any = None
    transfers: Any = None
    stage: str = "fit"


def _nothing() -> None:
    """Do nothing, while nobody listens."""


class SessionPrecision(Precision):
    """The precision of sessions, and two places in a step where Lightning calls it.

    Attributes:
        context: Makes the context of forward passes, as the run's precision wants it.
        before_step: Called when the gradients of a step are there, before a module's own hooks see
            them; None for nothing.
        clip: Clips as the run is configured, and returns False if it does not apply; None to clip
            as Lightning does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.context: Any = nullcontext
        self.before_step: Any = None
        self.clip: Any = None

    @override
    def forward_context(self) -> Any:
        return self.context()

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        if self.before_step is not None:
            self.before_step()
        super()._after_closure(model, optimizer)

    @override
    def clip_gradients(
        self, optimizer: Any, clip_val: Any = 0.0, *args: Any, **kwargs: Any
    ) -> None:
        if self.clip is not None and self.clip(optimizer, clip_val, *args, **kwargs):
            return
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)


class SessionStrategy(SingleDeviceStrategy):
    """A fit on one device, whatever ranks the run has, because other ranks have other clients.

    Attributes:
        after_transfer: Called with each batch after the transfer hooks; None for nothing.
        after_training_step: Called with what `training_step` has returned; None for nothing.
        after_optimizer_step: Called after each step of an optimizer; None for nothing.
    """

    after_transfer: Any = None
    after_training_step: Any = None
    after_optimizer_step: Any = None

    @override
    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().batch_to_device(*args, **kwargs)
        if self.after_transfer is not None:
            self.after_transfer(batch)
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if self.after_training_step is not None:
            self.after_training_step(output)
        return output

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self.after_optimizer_step is not None:
            self.after_optimizer_step()
        return output


class _Metrics(_LoggerConnector):
    """Keeps what a session logs for `callback_metrics`; the run's loggers get only its rounds."""

    trainer: "SessionTrainer"

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._logged_metrics.update(metrics)

    @override
    def update_train_epoch_metrics(self) -> None:
        self.trainer.epoch_ends()
        super().update_train_epoch_metrics()


class SessionTrainer(L.Trainer):
    """What a client's module sees as `self.trainer`, in one session after the other.

    Attributes:
        position: Where the session is.
        fitting: Whether Lightning's loops drive the session; otherwise `LocalSession` does.
        counted: Whether something has read the length or the progress of a session since this was
            set to False.
        for_the_run: Callbacks that the module has configured and that hear rounds.
        hook: The hook that is being called before the rows are laid out, for errors.
        epoch_ends: Called when Lightning is about to reset what an epoch has logged.
        frozen: Parameters that the `setup` of a callback has frozen, and may train later.
        precision_of_sessions: The precision of the sessions.
    """

    def __init__(self, module: L.LightningModule, host: SessionHost) -> None:
        """Make the Trainer of a group's sessions.

        Args:
            module: The group's live module.
            host: What it gets from the run.
        """
        self._run_trainer = host.run
        # While Lightning's constructor checks this Trainer, it must see its own callbacks, of which
        # there are none. After that it sees those of the run.
        self._trainer_of_callbacks: L.Trainer | None = None
        self.position = Position()
        self.fitting = False
        self.counted = False
        self.for_the_run: list[Callback] = []
        self.frozen: list[nn.Parameter] = []
        self.hook = ""
        self._closed = False
        self.epoch_ends: Callable[[], None] = _nothing
        self._host = host
        self.precision_of_sessions = SessionPrecision()

        with silenced(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example, that it would not use a GPU
            super().__init__(
                accelerator="cpu",  # the strategy has the device
                devices=1,
                strategy=SessionStrategy(host.device),
                plugins=[self.precision_of_sessions, LightningEnvironment()],
                logger=False,
                callbacks=[],
                max_epochs=1,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                log_every_n_steps=0,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                enable_autolog_hparams=False,
            )

        self._trainer_of_callbacks = host.run
        self._logger_connector = _Metrics(self)
        self.datamodule = host.datamodule
        self.strategy.connect(module)
        module.trainer = self
        self._data_connector._datahook_selector = _DataHookSelector(module, host.transfers)

    def __getattr__(self, name: str) -> Any:
        """Take from the run's Trainer what Lightning's does not have, such as `federation`."""
        run = self.__dict__.get("_run_trainer")  # copying asks before there are any attributes
        if run is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(run, name)

    def clips(self, limit: float, *, by_value: bool) -> None:
        """Set the clipping of gradients.

        Args:
            limit: The limit on each value, or on the norm.
            by_value: Whether each value is clipped; otherwise the norm is, as Lightning does if
                nothing else is said.
        """
        self.gradient_clip_val = limit
        self.gradient_clip_algorithm = GradClipAlgorithmType.VALUE if by_value else None

    # What happens once for each live module, in Lightning's order.

    def open(
        self,
        module: L.LightningModule,
        callbacks: Sequence[Callback],
        once: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        """Let a module, and callbacks that act on steps, build and freeze what they want to.

        Args:
            module: The group's live module, on the CPU.
            callbacks: The callbacks of the run that act on steps.
            once: Runs on rank 0 what all ranks wait for; None to run it on this rank.

        Raises:
            UserError: The module's `prepare_data` fails. Errors of other hooks are passed on, and
                `hook` says where they come from.
        """
        configured: Any = []
        if is_overridden("configure_callbacks", module):
            configured = module.configure_callbacks()
        if isinstance(configured, Callback):
            configured = [configured]
        self.for_the_run, on_steps = split(configured)
        # A module's callback takes the place of one of the same class, as in Lightning.
        replaced_classes = {type(callback) for callback in on_steps}
        kept = [callback for callback in callbacks if type(callback) not in replaced_classes]
        self.callbacks = [*kept, *on_steps]

        stage: Any = TrainerFn(self._host.stage)
        self.state.fn = stage
        self.state.stage = None
        if is_overridden("prepare_data", module):
            self.hook = "prepare_data"
            prepare = partial(self._prepare_data, module)
            if once is None:
                prepare()
            else:
                once(prepare)

        self.hook = "setup"
        trainable = [p for p in module.parameters() if p.requires_grad]
        _call_callback_hooks(self, "setup", stage=stage)
        self.frozen = [p for p in trainable if not p.requires_grad]
        _call_lightning_module_hook(self, "setup", stage=stage)

        self.hook = "configure_model"
        _call_configure_model(self)

    def _prepare_data(self, module: L.LightningModule) -> None:
        """Call the hook of a module.

        Raises:
            UserError: The hook fails. As one line, the error can be sent to all ranks.
        """
        try:
            _call_lightning_module_hook(self, "prepare_data")
        except Exception as error:
            found = f"prepare_data of {type(module).__name__}: {reason(error)}"
            raise UserError("model.clients", found, "correct it") from error

    def close(self) -> None:
        """End the run for a live module and its callbacks; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        stage: Any = TrainerFn(self._host.stage)
        self.state.fn = stage
        _call_callback_hooks(self, "teardown", stage=stage)
        _call_lightning_module_hook(self, "teardown", stage=stage)

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Let parameters that a callback has frozen be trained, for a block.

        In it rows are laid out. Parameters that are frozen only for a while need a place in them.
        """
        for p in self.frozen:
            p.requires_grad = True
        try:
            yield
        finally:
            for p in self.frozen:
                p.requires_grad = False

    # The session as a fit.

    @contextmanager
    def configuring(self) -> Iterator[None]:
        """Let optimizers be configured in a block.

        `counted` tells afterwards whether they depend on the session.
        """
        was_active = self.position.active
        self.counted = False
        self.position.active = True
        try:
            yield
        finally:
            self.position.active = was_active

    @contextmanager
    def running(self, loop: Any) -> Iterator[None]:
        """Let a loop of Lightning drive a session in a block."""
        self.fit_loop = loop
        self.fitting = True
        self.state.fn = TrainerFn.FITTING
        self.state.status = TrainerStatus.RUNNING
        self.state.stage = RunningStage.TRAINING
        self._logger_connector = _Metrics(self)
        try:
            yield
        finally:
            self.fitting = False
            self.state.status = TrainerStatus.FINISHED
            self.state.stage = None

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[None]:
        """Set what `trainer.training`, `trainer.validating` and the like say during a block.

        Args:
            stage: train or validate. In a run that tests or predicts, a model that is not trained
                is tested, or predicts.
        """
        stage_of_block: RunningStage | None = RunningStage(stage)
        if stage != "train" and self._run_trainer is not None:
            stage_of_run = self._run_trainer.state.stage
            if stage_of_run in (RunningStage.TESTING, RunningStage.PREDICTING):
                stage_of_block = stage_of_run

        stage_before = self.state.stage
        self.state.stage = stage_of_block
        try:
            yield
        finally:
            self.state.stage = stage_before

    def moved(self, batch: Any) -> Any:
        """Return a batch after the transfer hooks of the module, or of the user's data module."""
        batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.strategy.batch_to_device(batch, dataloader_idx=0)

    def set_optimizers(self, optimizers: list[Optimizer], schedulers: list[Any]) -> None:
        """Set what `self.optimizers()` and `self.lr_schedulers()` give in a session."""
        self.strategy.optimizers = optimizers
        self.strategy.lr_scheduler_configs = schedulers

    @property
    @override
    def strategy(self) -> SessionStrategy:
        strategy = super().strategy
        assert isinstance(strategy, SessionStrategy)
        return strategy

    def _counts(self) -> bool:
        """Whether counts are those of a session; also notes that somebody has read them."""
        self.counted = True
        return self.position.active or self._run_trainer is None

    @property
    def fit_loop(self) -> Any:
        """Lightning's loops, while they drive a session.

        Raises:
            UserError: A step or `configure_optimizers` reads them where they do not drive it, or
                reads something that follows from them.
        """
        if self.position.active and not self.fitting:
            found = "a step or configure_optimizers reads the loops or the loader of self.trainer"
            fix = "use global_step, current_epoch, num_training_batches, estimated_stepping_batches"
            raise UserError("model.clients", found, fix)
        return self._loops

    @fit_loop.setter
    def fit_loop(self, loops: Any) -> None:
        self._loops = loops

    @property
    @override
    def max_steps(self) -> int:
        return -1  # a session has no limit of its own

    @property
    @override
    def global_step(self) -> int:
        if self.fitting:
            return self.fit_loop.epoch_loop.global_step
        if not self._counts():
            return self._run_trainer.global_step  # type: ignore[union-attr]
        return self.position.first + self.position.batch

    @property
    @override
    def current_epoch(self) -> int:
        if self.fitting:
            return super().current_epoch
        if not self._counts():
            return self._run_trainer.current_epoch  # type: ignore[union-attr]
        return self.position.batch // self.position.epoch_batches

    @property
    @override
    def max_epochs(self) -> int | None:
        if not self._counts():
            return self._run_trainer.max_epochs  # type: ignore[union-attr]
        return self.position.epochs

    @property
    @override
    def num_training_batches(self) -> int | float:
        if not self._counts():
            return self._run_trainer.num_training_batches  # type: ignore[union-attr]
        return self.position.epoch_batches

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        if not self._counts():
            return self._run_trainer.estimated_stepping_batches  # type: ignore[union-attr]
        return self.position.total

    @property
    @override
    def is_last_batch(self) -> bool:
        if self.fitting:
            return super().is_last_batch
        if not self._counts():
            return self._run_trainer.is_last_batch  # type: ignore[union-attr]
        position = self.position
        done = position.batch + 1
        return done == position.total or done % position.epoch_batches == 0

    @property
    def round(self) -> int:
        """The round of the run; 0 without one."""
        return 0 if self._run_trainer is None else self._run_trainer.current_epoch

    @property
    @override
    def callback_metrics(self) -> Any:
        if self.fitting or self._run_trainer is None:
            return super().callback_metrics
        return self._run_trainer.callback_metrics

    @property
    @override
    def logged_metrics(self) -> Any:
        if self.fitting or self._run_trainer is None:
            return super().logged_metrics
        return self._run_trainer.logged_metrics

    # What is that of the process, or of the run.

    @property
    @override
    def checkpoint_callbacks(self) -> Any:
        run = self._trainer_of_callbacks
        return super().checkpoint_callbacks if run is None else run.checkpoint_callbacks

    @property
    @override
    def early_stopping_callbacks(self) -> Any:
        run = self._trainer_of_callbacks
        return super().early_stopping_callbacks if run is None else run.early_stopping_callbacks

    @property
    @override
    def progress_bar_callback(self) -> Any:
        run = self._trainer_of_callbacks
        return super().progress_bar_callback if run is None else run.progress_bar_callback

    @property
    @override
    def loggers(self) -> Any:
        run = self._run_trainer
        return [] if run is None else run.loggers

    @loggers.setter
    def loggers(self, loggers: Any) -> None:
        """Do nothing: they are those of the run."""

    @property
    @override
    def global_rank(self) -> int:
        return 0 if self._run_trainer is None else self._run_trainer.global_rank

    @property
    @override
    def local_rank(self) -> int:
        return 0 if self._run_trainer is None else self._run_trainer.local_rank

    @property
    @override
    def node_rank(self) -> int:
        return 0 if self._run_trainer is None else self._run_trainer.node_rank

    @property
    @override
    def is_global_zero(self) -> bool:
        return self._run_trainer is None or self._run_trainer.is_global_zero

    @property
    @override
    def default_root_dir(self) -> str:
        run = self._run_trainer
        return super().default_root_dir if run is None else run.default_root_dir

    @property
    @override
    def precision(self) -> Any:
        return super().precision if self._run_trainer is None else self._run_trainer.precision
