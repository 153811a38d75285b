"""A session as Lightning's own fit, for modules and callbacks that override its hooks.

Lightning's loops drive the session and call the hooks, in their order. This file adds what they do
not know: the batches of a session, what a method does to its gradients and its row, and the state
that belongs to a client.
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
    """Where a module logs: `lightfed.local.logbook.LogBook`, as far as it is needed here."""

    batch_size: int

    def see(self, batch: Any) -> None: ...
    def epoch_ends(self) -> None: ...
    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None: ...


class _Epochs:
    """The batches of a session as a loader, which gives one epoch each time it is iterated.

    Args:
        batches: The batches of the whole session.
        epoch_batches: The number of batches of an epoch; the last epoch may have fewer.
        total: The number of batches of the session.
    """

    def __init__(self, batches: Iterable[Any], *, epoch_batches: int, total: int) -> None:
        self._batches = iter(batches)
        self._epoch_batches = epoch_batches
        self._total = total
        self._started = 0  # batches of all epochs that have begun
        self._taken = 0  # those of them that have been trained on or skipped
        self._length = min(epoch_batches, total)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # A hook may have ended the last epoch early, by -1 from on_train_batch_start. The rest of
        # that epoch is skipped.
        for _ in islice(self._batches, self._started - self._taken):
            pass
        self._taken = self._started

        self._length = min(self._epoch_batches, self._total - self._started)
        self._started += self._length
        return self._batches_of_epoch(self._length)

    def _batches_of_epoch(self, length: int) -> Iterator[Any]:
        """Yield the next batches, and count those that have been asked for."""
        for batch in islice(self._batches, length):
            self._taken += 1
            yield batch


class _EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over the batches of a local epoch.

    Args:
        trainer: The Trainer of the sessions.
        first: The number of steps that the client has taken in its earlier sessions, from where
            `global_step` counts on.
    """

    def __init__(self, trainer: SessionTrainer, *, first: int) -> None:
        super().__init__(trainer)
        for progress in (
            self.automatic_optimization.optim_progress.optimizer.step,
            self.manual_optimization.optim_step_progress,
        ):
            progress.total.ready = first
            progress.total.completed = first


class _SessionLoop(_FitLoop):
    """Lightning's loop over the local epochs of a session."""

    def __init__(self, trainer: SessionTrainer, batches: Iterable[Any]) -> None:
        position = trainer.position
        super().__init__(trainer, max_epochs=position.epochs)
        self.epoch_loop = _EpochLoop(trainer, first=position.first)
        self._loader = _Epochs(batches, epoch_batches=position.epoch_batches, total=position.total)

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
        clipping: The clipping of the run, a `lightfed.local.optimizer.Clipping`; None for none.
        key: The configuration key of the group's model, for errors.

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
        self._live = live
        self._trainer = trainer
        self._configure = configure
        self._book = book
        self._clipping = clipping
        self._key = key
        self.rates: SessionRates | None = None

        module = trainer.lightning_module
        assert isinstance(module, L.LightningModule)
        self._module = module
        # A session may freeze or thaw parameters; the next client begins as this one did.
        self._requires_grad = [(p, p.requires_grad) for p in module.parameters()]

        vars(module).update(log=self._log, log_dict=self._log_dict)
        for callback in trainer.callbacks:
            vars(callback).update(log=self._log, log_dict=self._log_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientFit":
        """Return the object itself: copies of the module keep its `log`, which belongs to this."""
        return self

    def run(self, row: Row, work: Any) -> tuple[list[Tensor], list[int], int, int]:
        """Train the module, which is bound to a client's row.

        Args:
            row: The row.
            work: What the client trains on, a `lightfed.local.session.Work`.

        Returns:
            The losses of the batches, the sizes of the batches, the number of batches that took a
            step, and the number of steps that the optimizers took.

        Raises:
            UserError: The module cannot do what the method asks for.
        """
        session = _Session(
            row, work, live=self._live, trainer=self._trainer, book=self._book, rates=self.rates
        )
        optimizers, schedulers = self._configure(work.lr)
        self._check(work)

        states = OptimizerStates(optimizers, schedulers)
        carries = work.proximal is not None and work.proximal.carries
        if carries and work.proximal.momentum is not None:
            _continue(states, work.proximal.momentum, optimizers, lr=work.lr)
        self._trainer.set_optimizers(optimizers, schedulers)

        loop = self._drive(session)
        if carries:
            work.proximal.momentum = states.saved(self._key)

        optimizer_steps = loop.epoch_loop.global_step - work.first
        if self._module.automatic_optimization:
            batches_that_stepped = len(session.losses)
        else:
            batches_that_stepped = len(session.sizes)  # such a module need not return a loss
        return session.losses, session.sizes, batches_that_stepped, optimizer_steps

    def _drive(self, session: "_Session") -> _SessionLoop:
        """Let Lightning's loop train a session, and leave nothing of the client in the module."""
        trainer = self._trainer
        trainer.should_stop = False
        trainer.precision_of_sessions.before_step = session.change_gradients
        trainer.precision_of_sessions.clip = None if self._clipping is None else self._clip
        trainer.strategy.after_training_step = session.trained_on
        trainer.strategy.after_transfer = session.moved
        trainer.strategy.after_optimizer_step = session.stepped
        trainer.epoch_ends = self._book.epoch_ends

        loop = _SessionLoop(trainer, session.batches())
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
        return loop

    def _clean(self) -> None:
        """Remove what Lightning and the session have left in the module."""
        self._module._current_fx_name = None
        self._module._metric_attributes = None
        self._module._param_requires_grad_state = {}
        for parameter, requires_grad in self._requires_grad:
            parameter.grad = None
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad = requires_grad

    def _check(self, work: Any) -> None:
        """Refuse a method that changes steps, if the module takes them itself."""
        module = self._module
        if module.automatic_optimization:
            return

        adds = {
            "a change to gradients": work.hook is not None,
            "a pull": work.proximal is not None and bool(work.proximal.gamma),
            "a mask": work.mask is not None,
            "phases": bool(work.phases),
        }
        for addition, is_added in adds.items():
            if is_added:
                name = type(module).__name__
                found = f"{name} optimizes manually, and the method adds {addition}"
                fix = "set automatic_optimization = True, or choose a method such as FedAvg"
                raise UserError(self._key, found, fix)

    def _clip(self, optimizer: Any, limit: Any, algorithm: Any = None, **_: Any) -> bool:
        """Clip gradients as the run is configured.

        Args:
            optimizer: The optimizer that is about to step, perhaps within Lightning's own.
            limit: The limit that Lightning or a module's hook asks for.
            algorithm: The way of clipping that it asks for.

        Returns:
            False if a hook asks for something else; then nothing is clipped.
        """
        clipping = self._clipping
        assert clipping is not None
        asked_for = "norm" if algorithm is None else getattr(algorithm, "value", algorithm)
        configured = "value" if clipping.algorithm == "value" else "norm"
        if float(limit) != clipping.limit or asked_for != configured:
            return False

        plain_optimizer = getattr(optimizer, "optimizer", optimizer)
        parameters = [p for group in plain_optimizer.param_groups for p in group["params"]]
        with_grad = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        if with_grad:
            clip = clipping.of(self._module, plain_optimizer)
            clip([parameters[i].grad for i in with_grad], with_grad)
        return True

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log for the mean over the session, and in a fit also for the value of its epoch."""
        self._book.log(name, value, *args, **options)
        if self._trainer.fitting:
            options.setdefault("batch_size", self._book.batch_size)
            L.LightningModule.log(self._module, name, value, *args, **options)

    def _log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self._log(name, value, *args, **options)


def _continue(
    states: OptimizerStates, saved: Tensor, optimizers: Sequence[Optimizer], *, lr: float | None
) -> None:
    """Put back the state of the client's last session, but not its learning rate.

    Args:
        states: The state of the optimizers of this session.
        saved: What the last session has left.
        optimizers: The optimizers of this session.
        lr: The learning rate of the round. None if the module has rates of its own, which go on
            from session to session.
    """
    rates = [group["lr"] for group in optimizers[0].param_groups]
    states.load(saved)
    if lr is not None:
        for group, rate in zip(optimizers[0].param_groups, rates, strict=True):
            group["lr"] = rate


class _Session:
    """One client's session: its losses, and what the method does to its gradients and its row.

    Args:
        row: The client's row.
        work: What the client trains on, a `lightfed.local.session.Work`.
        live: The group's module, bound to the row.
        trainer: The Trainer of the sessions.
        book: Keeps what the module logs.
        rates: Reads the learning rates to log; None if nobody monitors them.

    Attributes:
        losses: The loss of each batch that had one, as a scalar.
        sizes: The number of samples of each batch that was trained on.
    """

    def __init__(
        self,
        row: Row,
        work: Any,
        *,
        live: LiveModule,
        trainer: SessionTrainer,
        book: Book,
        rates: SessionRates | None,
    ) -> None:
        self._row = row
        self._work = work
        self._live = live
        self._trainer = trainer
        self._book = book
        self._rates = rates
        self._optimizes_manually = not trainer.lightning_module.automatic_optimization

        self._trainable = live.trainable
        # Views of the row. A step or an optimizer may give a parameter other memory.
        self._values = [p.data for p in self._trainable]
        self._trained: set[int] = set()  # ids of the parameters of this phase; all if empty
        self._gradient: Tensor | None = None  # (P,) as one vector, for a method's hook
        self.losses: list[Tensor] = []
        self.sizes: list[int] = []

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the session, and note where it is."""
        for index, batch in enumerate(self._work.batches):
            self._trainer.position.batch = index
            self._book.see(batch)
            if self._rates is not None:
                self._log_rates(self._rates)
            if index in self._work.phases:
                self._trained = {id(p) for p in self._work.phases[index]}
            yield batch

    def _log_rates(self, rates: SessionRates) -> None:
        """Log the present learning rates of the optimizers."""
        trainer = self._trainer
        rate_by_name = rates.of(trainer.optimizers, trainer.lr_scheduler_configs)
        for name, rate in rate_by_name.items():
            self._book.log(name, rate)

    def moved(self, batch: Any) -> None:
        """Note the size of a batch anew: the transfer hooks may have changed it."""
        with suppress(Exception):  # a batch of a user's own class keeps the size that it had
            self._book.see(batch)

    def trained_on(self, output: Any) -> None:
        """Take what `training_step` has returned."""
        put_back(self._trainable, self._values)

        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().reshape(()))
        if isinstance(loss, Tensor) or self._optimizes_manually:
            self.sizes.append(self._book.batch_size)

    def stepped(self) -> None:
        """Bring the row in order after a step of an optimizer."""
        put_back(self._trainable, self._values)
        if self._work.mask is not None:
            apply_mask_(self._row.floats, self._work.mask)

    @torch.no_grad()
    def change_gradients(self) -> None:
        """Change the gradients of a step as the method does, before any hook of the module."""
        if self._trained:
            for parameter in self._trainable:
                if id(parameter) not in self._trained:
                    parameter.grad = None

        # By the position of the parameter; a parameter that had no part in the loss has none.
        grads = {i: p.grad for i, p in enumerate(self._trainable) if p.grad is not None}
        if self._work.hook is not None:
            grads = self._passed_through(self._work.hook, grads)

        pull = self._work.proximal
        if pull is not None and pull.gamma:
            anchors = self._views(pull.anchor)
            for i, grad in grads.items():
                grads[i] = grad + pull.gamma * (self._values[i] - anchors[i])

        for i, grad in grads.items():
            self._trainable[i].grad = grad

    def _passed_through(
        self, hook: Callable[[Tensor], None], grads: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """Let a method change the gradient as one vector (P,), with 0 where there is none."""
        if self._gradient is None:
            parameters = self._row.floats[: self._live.layout.parameter_size]
            self._gradient = torch.zeros_like(parameters)
        gradient = self._gradient.zero_()

        views = self._views(gradient)
        for i, grad in grads.items():
            views[i].copy_(grad)
        hook(gradient)
        # Copies, because the vector is used again for the next step.
        return {i: views[i].clone() for i in grads}

    def _views(self, row: Tensor) -> list[Tensor]:
        """Return views of a row (P,) in the shapes of the trained parameters, in their order."""
        layout = self._live.layout
        view_of_name = {}
        for entry in layout.floats.entries[: layout.parameters]:
            view_of_name[entry.name] = layout.floats.view(row, entry)
        name_of = {id(p): name for name, p in self._live.module.named_parameters()}
        return [view_of_name[name_of[id(p)]] for p in self._trainable]
