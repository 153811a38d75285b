"""A session as Lightning's own fit, for modules and callbacks that override its hooks.

Lightning's loops call the hooks, in their order. Here are the batches of the session, what a method
does to its gradients, and the state that belongs to a client.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

import lightning.pytorch as L
import torch
from lightfed_kernels import apply_mask_
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightfed.lightning_fits.optimizer_states import OptimizerStates
from lightfed.lightning_fits.session_rates import SessionRates
from lightfed.lightning_fits.session_trainer import SessionTrainer
from lightfed.state.rows import LiveModule, Row, put_back
from lightfed.utils.errors import UserError
from lightfed.utils.lightning_private import (
    CombinedLoader,
    _call_callback_hooks,
    _call_lightning_module_hook,
    _FitLoop,
    _select_data_fetcher,
    _TrainingEpochLoop,
)

Configured = tuple[list[Optimizer], list[LRSchedulerConfig]]
# Makes the optimizers of a session, with the learning rate of the round.
Configure = Callable[[float | None], Configured]


class Book(Protocol):
    """Where a module logs: `lightfed.local.logbook.LogBook`."""

    batch_size: int

    def see(self, batch: Any) -> None: ...
    def epoch_ends(self) -> None: ...
    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None: ...


class _Epochs:
    """The batches of a session as a loader: an epoch each time that it is iterated."""

    def __init__(self, batches: Iterable[Any], *, epoch: int, total: int) -> None:
        self._batches = iter(batches)
        self._epoch, self._total = epoch, total
        self._started = 0  # batches of the epochs that have begun
        self._taken = 0  # of these, those that have been trained on or skipped
        self._length = min(epoch, total)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # A hook may have ended the last epoch early, by -1 from on_train_batch_start.
        for _ in islice(self._batches, self._started - self._taken):
            pass
        self._taken = self._started
        self._length = min(self._epoch, self._total - self._started)
        self._started += self._length
        return self._of_epoch(self._length)

    def _of_epoch(self, length: int) -> Iterator[Any]:
        for batch in islice(self._batches, length):
            self._taken += 1
            yield batch


class _EpochLoop(_TrainingEpochLoop):
    """A local epoch."""

    def __init__(self, trainer: SessionTrainer, *, first: int) -> None:
        """Begin to count at the steps that the client has taken in its earlier sessions."""
        super().__init__(trainer)
        for progress in (
            self.automatic_optimization.optim_progress.optimizer.step,
            self.manual_optimization.optim_step_progress,
        ):
            progress.total.ready = progress.total.completed = first


class _SessionLoop(_FitLoop):
    """The local epochs of a session."""

    def __init__(self, trainer: SessionTrainer, batches: Iterable[Any]) -> None:
        position = trainer.position
        super().__init__(trainer, max_epochs=position.epochs)
        self.epoch_loop = _EpochLoop(trainer, first=position.first)
        self._loader = _Epochs(batches, epoch=position.epoch_batches, total=position.total)

    @override
    def setup_data(self) -> None:
        if self._combined_loader is not None:
            return
        self._combined_loader = CombinedLoader(self._loader, "min_size")
        self._data_fetcher = _select_data_fetcher(self.trainer, RunningStage.TRAINING)
        self._data_fetcher.setup(self._combined_loader)
        iter(self._data_fetcher)
        self.max_batches = len(self._loader)

    @override
    def _warn_if_modules_in_eval_mode(self) -> None:
        """Do nothing: a module may keep a part in evaluation mode, by its `train`."""


class ClientFit:
    """Drives the sessions of a group's clients, one after the other, as Lightning fits.

    Args:
        live: The group's module and its rows.
        trainer: What the module sees as `self.trainer`.
        configure: Makes the optimizers of a session.
        book: Keeps what the module logs.
        clipping: Of the run, a `lightfed.local.optimizer.Clipping`; None for none.
        key: Of the group's model in the configuration.

    Attributes:
        rates: Reads the learning rates that sessions log; None if nobody monitors them.
    """

    def __init__(
        self,
        live: LiveModule,
        trainer: SessionTrainer,
        configure: Configure,
        book: Book,
        *,
        clipping: Any,
        key: str,
    ) -> None:
        self._live, self._trainer, self._configure, self._book = live, trainer, configure, book
        self._clipping, self._key = clipping, key
        self.rates: SessionRates | None = None
        module = trainer.lightning_module
        assert isinstance(module, L.LightningModule)
        self._module = module
        self._trains = [(p, p.requires_grad) for p in module.parameters()]
        vars(module).update(log=self._log, log_dict=self._log_dict)
        for callback in trainer.callbacks:
            vars(callback).update(log=self._log, log_dict=self._log_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientFit":
        """A copy of the module has its `log`, which is this object's: it is not copied."""
        return self

    def run(self, row: Row, work: Any) -> tuple[list[Tensor], list[int], int, int]:
        """Train a bound row.

        Returns:
            The losses of its batches, their sizes, the number of batches that took a step, and how
            many steps its optimizers took.
        """
        trainer, module = self._trainer, self._module
        session = _Session(self, row, work)
        optimizers, schedulers = self._configure(work.lr)
        self._check(optimizers, work)
        states = OptimizerStates(optimizers, schedulers)
        carried = work.proximal is not None and work.proximal.carries
        if carried and work.proximal.momentum is not None:
            rates = [group["lr"] for group in optimizers[0].param_groups]
            states.load(work.proximal.momentum)
            if work.lr is not None:  # that of the round, and not that of the last session
                for group, rate in zip(optimizers[0].param_groups, rates, strict=True):
                    group["lr"] = rate
        trainer.set_optimizers(optimizers, schedulers)
        trainer.should_stop = False
        precision, strategy = trainer.precision_of_sessions, trainer.strategy
        precision.before_step = session.change_gradients
        precision.clip = self._clip if self._clipping is not None else None
        strategy.after_training_step = session.trained_on
        strategy.after_transfer = session.moved
        strategy.after_optimizer_step = session.stepped
        trainer.epoch_ends = self._book.epoch_ends
        loop = _SessionLoop(trainer, session.each(work.batches))
        try:
            with trainer.running(loop):
                _call_callback_hooks(trainer, "on_fit_start")
                _call_lightning_module_hook(trainer, "on_fit_start")
                loop.run()
                _call_callback_hooks(trainer, "on_fit_end")
                _call_lightning_module_hook(trainer, "on_fit_end")
        except Exception as error:
            _call_callback_hooks(trainer, "on_exception", error)
            raise
        finally:
            loop.teardown()
            self._clean()
        if carried:
            work.proximal.momentum = states.saved(self._key)
        updates = loop.epoch_loop.global_step - work.first
        steps = len(session.losses) if module.automatic_optimization else len(session.sizes)
        return session.losses, session.sizes, steps, updates

    def _clean(self) -> None:
        """Leave nothing of a client in the module."""
        self._module._current_fx_name = None
        self._module._metric_attributes = None
        self._module._param_requires_grad_state = {}
        for parameter, trains in self._trains:
            parameter.grad = None
            if parameter.requires_grad is not trains:
                parameter.requires_grad = trains

    def _check(self, optimizers: Sequence[Optimizer], work: Any) -> None:
        """Refuse what a session of several optimizers, or a manual one, cannot combine with."""
        module = self._module
        if module.automatic_optimization:
            return
        parts = {
            "a change to gradients": work.hook is not None,
            "a pull": work.proximal is not None and bool(work.proximal.gamma),
            "a mask": work.mask is not None,
            "phases": bool(work.phases),
        }
        for part, given in parts.items():
            if given:
                found = f"{type(module).__name__} optimises manually, and the method adds {part}"
                fix = "set automatic_optimization = True, or choose a method such as FedAvg"
                raise UserError(self._key, found, fix)

    def _clip(self, optimizer: Any, limit: Any, algorithm: Any = None, **_: Any) -> bool:
        """Clip as the run is configured; False if a hook asks for something else."""
        clipping = self._clipping
        assert clipping is not None
        asked = "norm" if algorithm is None else getattr(algorithm, "value", algorithm)
        own = "value" if clipping.algorithm == "value" else "norm"
        if float(limit) != clipping.limit or asked != own:
            return False
        plain = getattr(optimizer, "optimizer", optimizer)
        parameters = [p for group in plain.param_groups for p in group["params"]]
        used = [i for i, p in enumerate(parameters) if p.grad is not None]
        if used:
            clipping.of(self._module, plain)([parameters[i].grad for i in used], used)
        return True

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """`self.log`: a mean over the session, and in a fit also a value of its epoch."""
        self._book.log(name, value, *args, **options)
        if self._trainer.fitting:
            options.setdefault("batch_size", self._book.batch_size)
            L.LightningModule.log(self._module, name, value, *args, **options)

    def _log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self._log(name, value, *args, **options)


class _Session:
    """One client's session: its losses, and what the method does to its gradients and its row."""

    def __init__(self, fit: ClientFit, row: Row, work: Any) -> None:
        self._book, self._row, self._work = fit._book, row, work
        self._trainer, self._rates = fit._trainer, fit.rates
        self._manual = not fit._module.automatic_optimization
        self._live = fit._live
        self._trainable = fit._live.trainable
        self._values = [p.data for p in self._trainable]
        self._span = row.floats[: fit._live.layout.parameter_size]
        self._position = fit._trainer.position
        self._trained: set[int] = set()  # parameters of the phase; all if empty
        self._flat: Tensor | None = None
        self.losses: list[Tensor] = []
        self.sizes: list[int] = []

    def each(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, noting where the session is."""
        for index, batch in enumerate(batches):
            self._position.batch = index
            self._book.see(batch)
            if self._rates is not None:
                optimizers = self._trainer.optimizers
                rates = self._rates.of(optimizers, self._trainer.lr_scheduler_configs)
                for name, value in rates.items():
                    self._book.log(name, value)
            if index in self._work.phases:
                self._trained = {id(p) for p in self._work.phases[index]}
            yield batch

    def moved(self, batch: Any) -> None:
        """The transfer hooks have returned a batch; they may have changed its size."""
        with suppress(Exception):  # of a class of the user's: as long as before
            self._book.see(batch)

    def trained_on(self, output: Any) -> None:
        """`training_step` has returned."""
        put_back(self._trainable, self._values)
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().reshape(()))
        if isinstance(loss, Tensor) or self._manual:
            self.sizes.append(self._book.batch_size)

    def stepped(self) -> None:
        """An optimizer has stepped."""
        put_back(self._trainable, self._values)
        if self._work.mask is not None:
            apply_mask_(self._row.floats, self._work.mask)

    @torch.no_grad()
    def change_gradients(self) -> None:
        """What the method adds to the gradient of a step, before any hook of it."""
        work = self._work
        if self._trained:
            for p in self._trainable:
                if id(p) not in self._trained:
                    p.grad = None
        grads = {i: p.grad for i, p in enumerate(self._trainable) if p.grad is not None}
        if work.hook is not None:
            grads = self._passed_through(work.hook, grads)
        pull = work.proximal
        if pull is not None and pull.gamma:
            anchors = self._parts(pull.anchor)
            for i, grad in grads.items():
                grads[i] = grad + pull.gamma * (self._values[i] - anchors[i])
        for i, grad in grads.items():
            self._trainable[i].grad = grad

    def _parts(self, row: Tensor) -> list[Tensor]:
        """Views of a row (P,) in the shapes of the trained parameters, in their order."""
        layout = self._live.layout
        entries = layout.floats.entries[: layout.parameters]
        views = {entry.name: layout.floats.view(row, entry) for entry in entries}
        names = {id(p): name for name, p in self._live.module.named_parameters()}
        return [views[names[id(p)]] for p in self._trainable]

    def _passed_through(
        self, hook: Callable[[Tensor], None], grads: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """Let a method change the gradient (P,) as one vector."""
        if self._flat is None:
            self._flat = torch.zeros_like(self._span)
        flat = self._flat.zero_()
        parts = self._parts(flat)
        for i, grad in grads.items():
            parts[i].copy_(grad)
        hook(flat)
        return {i: parts[i].clone() for i in grads}
