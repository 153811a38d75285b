"""A session: one client's local training in one round, without a Trainer of its own.

Lightning's inner loops cost three to four times as much as a bare torch loop on small models. The
loop here is a bare loop with precision, clipping, schedulers and `self.log`. Where hooks of a
module ask for more than that, the session is a fit of Lightning.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import lightning.pytorch as L
import torch
from lightfed_kernels import apply_mask_
from torch import Tensor

from lightfed.data.tested_samples import TestSplit
from lightfed.lightning_fits.lightning_fit import ClientFit, Configure
from lightfed.lightning_fits.python_state import Attributes, PythonState
from lightfed.lightning_fits.session_rates import SessionRates
from lightfed.lightning_fits.session_trainer import Position, SessionTrainer
from lightfed.local.logbook import LogBook, batch_size, numbers, on_this_rank, reset_metrics
from lightfed.local.optimizer import Clipping, GradientHook, Proximal, Stepper
from lightfed.models.evaluating import Stage, StageHooks, stage_of
from lightfed.state.frozen_base import digest, digests
from lightfed.state.rows import LiveModule, Row, put_back
from lightfed.utils.errors import UserError
from lightfed.utils.reading import Pending
from lightfed.utils.rng import seed_default_generators
from lightfed.utils.stopwatch import Stopwatch

_NO_TRAINER = SimpleNamespace(should_stop=False)
Autocast = Callable[[], AbstractContextManager[Any]]

# Stands for the global test set where other reports have the number of a client.
GLOBAL = -1


@dataclass
class Report:
    """The report of a session or an evaluation, which ranks send to each other.

    Attributes:
        client: Number of the client; GLOBAL for the global test set.
        samples: Samples processed. A sample counts once for each epoch.
        steps: Batches whose loss the optimizers have used.
        metrics: Means weighted by samples, by name.
        norm: Norm of the trained row; nan or inf if the update is not finite.
        batch: Position among the batches of the global test set.
        flops: FLOPs of the forward pass of a sample.
        besides: FLOPs of the client's `Fleet.gradient` and `Fleet.loss`.
        stored: Bytes that the client keeps.
        error: Why the session failed, in one line; empty if it did not.
        updates: Steps of all optimizers, as Lightning's `global_step` counts them.
        seconds: Duration; 0 if it is not measured.
        split: The samples of a test.
    """

    client: int
    samples: int
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    norm: float = 0.0
    batch: int = -1
    flops: float = 0.0
    besides: float = 0.0
    stored: int = 0
    error: str = ""
    updates: int = 0
    seconds: float = field(default=0.0, compare=False)
    split: TestSplit = "test"

    def sources(self) -> list[Pending]:
        """Return nothing: all numbers of a report are on the host."""
        return []

    def resolve(self) -> "Report":
        """Return the report itself, of a session that failed or ran before a stop."""
        return self


def weighted_means(reports: Sequence[Report]) -> dict[str, float]:
    """Return the means of the reports' metrics, weighted by samples.

    The order of the reports decides the bits of the sums.
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for report in reports:
        for name, value in report.metrics.items():
            sums[name] = sums.get(name, 0.0) + value * report.samples
            counts[name] = counts.get(name, 0) + report.samples
    return {name: total / counts[name] for name, total in sums.items() if counts[name]}


@dataclass(frozen=True)
class Work:
    """The work of one session.

    Attributes:
        client: Number of the client.
        batches: The batches of the whole session, on the device.
        epoch_batches: Number of batches in one local epoch.
        lr: Learning rate of the round; None for the optimizer's own.
        seed: Seed of dropout and of other draws from the default generator of the device.
        hook: The algorithm's change to the gradients; None for none.
        mask: The elements that the client trains, as packed bits of shape (P / 32,). The others are
            set to 0 after every step. None for all.
        proximal: A pull towards another model, a decay, and an optimizer state to start from. The
            session stores the final state of its optimizer there.
        phases: The parameters to train from a batch on, by the number of that batch; empty for all
            parameters from the start.
        total: Number of batches.
        first: Steps that the client has taken in earlier sessions.
        attributes: What the client's module and callbacks keep in Python; None for nothing.
    """

    client: int
    batches: Iterable[Any]
    epoch_batches: int
    lr: float | None
    seed: int
    hook: GradientHook | None
    mask: Tensor | None = None
    proximal: Proximal | None = None
    phases: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    total: int = 1
    first: int = 0
    attributes: Attributes | None = None


@dataclass(frozen=True)
class Runtime:
    """The Trainer's settings for every session.

    Attributes:
        trainer: What a client's module sees as `self.trainer`, unless its session has one.
        forward_context: Autocast of the Trainer's precision; None in full precision.
        clipping: Clipping of gradients; None for none.
    """

    trainer: L.Trainer | None = None
    forward_context: Autocast | None = None
    clipping: Clipping | None = None


class LocalSession:
    """Trains and evaluates clients one after the other, in one module.

    Attributes:
        module: The module of a group, or one of an algorithm's own, which is only evaluated.
        rates: Reads the learning rates that sessions log; None if nobody monitors them.
    """

    def __init__(
        self,
        module: L.LightningModule,
        runtime: Runtime,
        *,
        live: LiveModule | None = None,
        stepper: Stepper | None = None,
        trainer: SessionTrainer | None = None,
        configure: Configure | None = None,
        transfers: bool = False,
        key: str = "model.clients",
    ) -> None:
        """Prepare the sessions of a module.

        Args:
            module: The module of a group, or one of an algorithm's own.
            runtime: Precision and clipping.
            live: The module's binding to rows; None if it is only evaluated.
            stepper: Takes the steps, unless sessions are fits of Lightning.
            trainer: What the module sees as `self.trainer`; None if it needs none.
            configure: Makes the optimizers of a session that is a fit of Lightning; None for other
                sessions.
            transfers: Whether hooks that transfer batches are overridden.
            key: Key of the model in the configuration, for errors.
        """
        self.module = module
        self.rates: SessionRates | None = None
        self._live = live
        self._stepper = stepper
        self._trainer = trainer
        self._position = Position() if trainer is None else trainer.position
        self._transfers = trainer if transfers else None
        self._context: Autocast = runtime.forward_context or nullcontext
        self._stages: dict[Stage, StageHooks] = {}
        self._frozen_are_checked = False

        self._log = LogBook()
        module.log = self._log.log  # type: ignore[method-assign]
        module.log_dict = self._log.log_dict  # type: ignore[method-assign, assignment]

        if trainer is not None:
            module.trainer = trainer
            trainer.precision_of_sessions.context = self._context
            clipping = runtime.clipping
            if clipping is not None:
                trainer.clips(clipping.limit, by_value=clipping.algorithm == "value")
        elif runtime.trainer is not None:
            module.trainer = runtime.trainer

        self._fit: ClientFit | None = None
        if configure is not None:
            assert live is not None
            assert trainer is not None
            self._fit = ClientFit(
                live, trainer, configure, self._log, clipping=runtime.clipping, key=key
            )
        callbacks = () if trainer is None else trainer.callbacks
        self._kept = PythonState(module, callbacks, key, always=self._fit is not None)

    def watch(self, rates: SessionRates) -> None:
        """Log the learning rates of the sessions from now on."""
        self.rates = rates
        if self._fit is not None:
            self._fit.rates = rates

    @property
    def box(self) -> tuple[float, float] | None:
        """Bounds that the optimizer projects parameters onto; None for none."""
        return None if self._stepper is None else self._stepper.box

    @on_this_rank
    def train(self, row: Row, work: Work) -> "PendingReport":
        """Train a row in place.

        Args:
            row: Values of the client, on the device.
            work: The batches, and how they are used.

        Returns:
            The report, of which numbers may still be on the device.
        """
        assert self._live is not None, "this session only evaluates"
        stopwatch = Stopwatch(row.floats.device)
        if self._live.row is not row:
            self._live.bind(row)
        if not self.module.training:
            self.module.train()
        reset_metrics(self.module)
        seed_default_generators(work.seed, row.floats.device)
        frozen_before = {} if self._frozen_are_checked else digests(self._live.frozen)

        self._kept.begin(work.attributes)
        self._position.begin(first=work.first, epoch_batches=work.epoch_batches, total=work.total)
        try:
            with nullcontext() if self._trainer is None else self._trainer.in_stage("train"):
                pending = self._run(row, work)
        except BaseException:
            self._kept.end(None)  # the client keeps what it had before
            raise
        finally:
            self._position.active = False
        self._kept.end(work.attributes)

        if work.mask is not None:
            # ASPG steps on a point ahead, and ends by writing its own iterate into the row.
            apply_mask_(row.floats, work.mask)
        self._live.unbind()
        if not self._frozen_are_checked:
            # Once, because digests of a large base take longer than a session.
            self._check_frozen(frozen_before)
            self._frozen_are_checked = True
        stopwatch.stop()

        pending.logged = self._log.close()
        # A dot product detects non-finite values as well as a maximum, ten times as fast.
        pending.square = torch.dot(row.floats, row.floats)
        pending.stopwatch = stopwatch
        return pending

    def _run(self, row: Row, work: Work) -> "PendingReport":
        """Train a bound row: as a fit of Lightning if hooks ask for it, else by our own loop."""
        if self._fit is not None:
            return PendingReport(work.client, *self._fit.run(row, work))
        return self._loop(row, work)

    def _loop(self, row: Row, work: Work) -> "PendingReport":
        """Train a bound row, a batch after the other."""
        assert self._live is not None
        assert self._stepper is not None, "this session only evaluates"
        # Local names, because a step of a tiny network takes 50 microseconds.
        module = self.module
        stepper = self._stepper
        log = self._log
        position = self._position
        trainer = self._trainer or _NO_TRAINER
        rates = self.rates
        context = self._context
        epoch_batches = work.epoch_batches
        phases = work.phases
        trainable = self._live.trainable
        views_of_row = [p.data for p in trainable]

        losses: list[Tensor] = []
        sizes: list[int] = []
        stepper.reset(work.lr, row.floats[: self._live.layout.parameter_size], work.proximal)
        trainer.should_stop = False
        try:
            for index, batch in enumerate(work.batches):
                position.batch = index
                if index in phases:
                    stepper.train_only(phases[index])
                size = batch_size(batch)
                log.batch_size = size
                if rates is not None:
                    log.log_dict(rates.of([stepper.optimizer], stepper.schedulers))

                with context():
                    loss = _loss(module.training_step(batch, index % epoch_batches))
                put_back(trainable, views_of_row)  # where a step has assigned new tensors
                if loss is None:
                    stepper.skip()
                else:
                    stepper.step(loss, work.hook)
                    if work.mask is not None:
                        put_back(trainable, views_of_row)
                        apply_mask_(row.floats, work.mask)
                    losses.append(loss.detach())
                    sizes.append(size)

                if (index + 1) % epoch_batches == 0:
                    stepper.schedule("epoch")
                if trainer.should_stop:
                    break
        finally:
            stepper.finish()  # a kept row must hold a model even after a session that raised
        # Lightning's `global_step` counts batches without a loss, too.
        updates = position.batch + 1
        return PendingReport(work.client, losses, sizes, len(losses), updates)

    def _check_frozen(self, before: Mapping[str, str]) -> None:
        """Refuse a step that has written a frozen parameter, which all clients share.

        Args:
            before: Digests of the frozen parameters before the session, by name.
        """
        assert self._live is not None
        for name, digest_before in before.items():
            if digest(self._live.frozen[name]) != digest_before:
                raise UserError(
                    "model.clients",
                    f"a step writes {name}, which is frozen and the same for all clients",
                    "name it in `written` of its module, or make it a buffer",
                )

    def _check_automatic(self) -> None:
        """Refuse to ask a module for its loss whose `training_step` would train it."""
        if not self.module.automatic_optimization:
            raise UserError(
                "model.clients",
                f"{type(self.module).__name__} optimizes manually, and the method asks for its "
                "losses outside of sessions",
                "set automatic_optimization = True, or choose a method such as FedAvg",
            )

    def abandon(self) -> None:
        """Clean up after a session that raised, so that the next one is not affected."""
        assert self._live is not None, "this session only evaluates"
        self._log.clear()
        self.module.zero_grad()  # gradients of a partial backward pass
        if self._live.row is not None:
            self._live.unbind()
        self._live.restore()

    @on_this_rank
    def gradient(self, row: Row, batch: Any) -> Tensor:
        """Return the gradient of a batch's loss at a row, in eval mode and full precision.

        The row does not change.

        Returns:
            A tensor of shape (P,), 0 for parameters that the loss does not use.
        """
        assert self._live is not None, "this session only evaluates"
        self._check_automatic()
        self._live.bind(row)
        self.module.eval()
        if self._transfers is not None:
            batch = self._transfers.moved(batch)
        self._log.see(batch)

        loss = _loss(self.module.training_step(batch, 0))
        gradient = torch.zeros_like(row.floats)
        if loss is not None:
            grads = torch.autograd.grad(loss, self._live.trainable, allow_unused=True)
            views = self._live.layout.floats.views(gradient)
            names = [name for name, p in self.module.named_parameters() if p.requires_grad]
            for name, grad in zip(names, grads, strict=True):
                if grad is not None:
                    views[name].copy_(grad)

        self._log.clear()
        self._live.unbind()
        return gradient

    @on_this_rank
    @torch.no_grad()
    def loss(self, row: Row, batches: Iterable[Any]) -> tuple[float, int]:
        """Return the mean loss of batches at a row, in eval mode, and their number of samples."""
        assert self._live is not None, "this session only evaluates"
        self._check_automatic()
        self._live.bind(row)
        self.module.eval()

        total = 0.0
        samples = 0
        for index, batch in enumerate(batches):
            if self._transfers is not None:
                batch = self._transfers.moved(batch)
            size = self._note(batch)
            loss = _loss(self.module.training_step(batch, index))
            if loss is not None:
                total += float(loss) * size
                samples += size

        self._log.clear()
        self._live.unbind()
        return total / max(samples, 1), samples

    @on_this_rank
    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Any], *, client: int, batch: int = -1, first: int = 0
    ) -> Report:
        """Evaluate the module as it is bound, by its `validation_step` or `test_step`.

        Args:
            batches: The batches of the test.
            client: Number of the client, for the report.
            batch: Position among the batches of the global test set, for the report.
            first: Number of the first batch, if others are evaluated on other ranks.
        """
        module = self.module
        reset_metrics(module)
        stage = stage_of(module)
        if stage not in self._stages:
            moved = None if self._transfers is None else self._transfers.moved
            self._stages[stage] = StageHooks(module, stage, moved)
        with nullcontext() if self._trainer is None else self._trainer.in_stage("validate"):
            samples = self._stages[stage].evaluate(
                batches, device=module.device, context=self._context, note=self._note, first=first
            )
        return Report(client, samples, metrics=numbers(self._log.close()), batch=batch)

    def _note(self, batch: Any) -> int:
        """Note the batch that is evaluated next, and return its number of samples."""
        self._log.see(batch)
        return self._log.batch_size

    def forget(self) -> None:
        """Discard what an evaluation that raised has logged."""
        self._log.clear()


class SessionReport(Protocol):
    """A report of a session, alone or in a pack, of which numbers may still be on the device.

    Attributes:
        flops: FLOPs of the forward pass of a sample: a number, or a tensor on the device.
    """

    flops: Any

    @property
    def steps(self) -> int:
        """Optimizer steps."""

    def sources(self) -> list[Pending]:
        """Return what has to be read from the device before `resolve` is called."""

    def resolve(self) -> Report:
        """Return the report, with numbers of the host."""


@dataclass
class PendingReport:
    """A report of which numbers may still be on the device.

    `lightfed.utils.reading` reads the numbers of all clients' reports at once, so that the CPU
    waits for a GPU once a round.

    Attributes:
        client: Number of the client.
        losses: The loss of each batch that was used.
        sizes: The number of samples of each of these batches.
        steps: Batches whose loss the optimizers have used.
        updates: Steps of all optimizers.
        logged: Means of what the module has logged, by name.
        square: Squared norm of the trained row.
        stopwatch: Measures the session.
        flops: FLOPs of the forward pass of a sample.
    """

    client: int
    losses: list[Tensor]
    sizes: list[int]
    steps: int
    updates: int
    logged: dict[str, Tensor | float] = field(default_factory=dict)
    square: Tensor | float = 0.0
    stopwatch: Stopwatch | None = None
    flops: Tensor | float = 0.0

    def sources(self) -> list[Pending]:
        """Return what has to be read from the device before `resolve` is called."""
        return [self]

    def pending(self) -> list[Tensor]:
        """Return the tensors whose values `resolve` reads."""
        values = [*self.losses, self.square, *self.logged.values(), self.flops]
        return [value for value in values if isinstance(value, Tensor)]

    def receive(self, values: Sequence[Tensor]) -> None:
        """Replace the tensors of `pending` by their values on the host, in the same order."""
        arrived = iter(values)
        self.losses = [next(arrived) for _ in self.losses]
        if isinstance(self.square, Tensor):
            self.square = next(arrived)
        for name, value in self.logged.items():
            if isinstance(value, Tensor):
                self.logged[name] = next(arrived)
        if isinstance(self.flops, Tensor):
            self.flops = next(arrived)

    def resolve(self) -> Report:
        """Return the report, with numbers of the host."""
        samples = sum(self.sizes)
        metrics = numbers(self.logged)
        # In a fit of Lightning with manual optimization the losses of some batches may be unknown.
        # A module that logs a `train_loss` of its own means that one.
        has_a_loss_of_each_batch = bool(self.losses) and len(self.losses) == len(self.sizes)
        if has_a_loss_of_each_batch:
            losses = [loss.item() for loss in self.losses]
            weighted = sum(loss * size for loss, size in zip(losses, self.sizes, strict=True))
            metrics.setdefault("train_loss", weighted / samples)

        # The norm was computed after the session. As it is known, the events of the stopwatch are
        # done, and reading them does not wait.
        norm = float(self.square) ** 0.5
        assert self.stopwatch is not None
        return Report(
            self.client,
            samples,
            self.steps,
            metrics,
            norm,
            flops=float(self.flops),
            seconds=self.stopwatch.seconds(),
            updates=self.updates,
        )


def _loss(output: Any) -> Tensor | None:
    """Return the loss that a `training_step` gives, also as {"loss": ...}; None skips the batch."""
    return output["loss"] if isinstance(output, dict) else output
