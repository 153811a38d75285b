"""A session: one client's local training in one round, without a Trainer of its own.

On small models Lightning's inner loops cost three to four times as much as a bare torch loop. This
one is a bare loop plus precision, clipping, schedulers and `self.log`.
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

from lightfed.lightning_fits.lightning_fit import ClientFit, Configure
from lightfed.lightning_fits.python_state import Attributes, PythonState
from lightfed.lightning_fits.session_rates import SessionRates
from lightfed.lightning_fits.session_trainer import Position, SessionTrainer
from lightfed.local.logbook import LogBook, batch_size, numbers, on_this_rank, reset_metrics
from lightfed.local.optimizer import Clipping, GradientHook, Proximal, Stepper
from lightfed.models.evaluating import Stage, StageHooks, stage_of
from lightfed.state.frozen_base import digest, digests
from lightfed.state.rows import LiveModule, Row, put_back
from lightfed.utils.errors import require
from lightfed.utils.reading import Pending
from lightfed.utils.rng import seed_default_generators
from lightfed.utils.stopwatch import Stopwatch

_NO_TRAINER = SimpleNamespace(should_stop=False)
Autocast = Callable[[], AbstractContextManager[Any]]


GLOBAL = -1  # stands for the global test set, where others have the number of a client


@dataclass
class Report:
    """The report of a session or an evaluation; sent between ranks.

    Attributes:
        client: number of the client; GLOBAL for the global model.
        samples: samples processed (a sample counts once per epoch).
        steps: batches whose loss the optimisers have used.
        updates: steps of all optimisers, as Lightning's `global_step` counts them.
        flops: forward FLOPs of a sample.
        besides: FLOPs of the client's `Fleet.gradient` and `Fleet.loss`.
        stored: bytes that the client keeps.
        error: why the session failed, in one line; empty if it did not.
        seconds: duration; 0 if not measured.
        metrics: sample-weighted means by name.
        norm: of the trained row; nan or inf where the update is not finite.
        batch: position among the batches of the global test set.
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

    def sources(self) -> list[Pending]:
        """Nothing: all numbers are on the host."""
        return []

    def resolve(self) -> "Report":
        """The report itself, as of sessions that failed or ran before a restart."""
        return self


def weighted_means(reports: Sequence[Report]) -> dict[str, float]:
    """Sample-weighted means of the reports' metrics, in the order given (which fixes the bits)."""
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
        client: number of the client.
        batches: of the whole session, on the device.
        epoch_batches: batches of one local epoch.
        lr: learning rate of the round; None keeps the optimiser's own.
        seed: of dropout and other draws from the device's default generator.
        hook: the algorithm's change to the gradients.
        mask: packed words (P / 32,); uncovered elements are 0 after every step.
        proximal: a pull towards another model; the session stores its optimiser's state there.
        phases: the parameters trained from a batch on, by its index; all where nothing is given.
        total: number of the batches.
        first: steps that the client has taken in its earlier sessions.
        attributes: what the client's module and callbacks keep in Python; None for nothing yet.
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
    """The Trainer's settings for every session: its precision (None in full) and clipping.

    `trainer` is available as `self.trainer` in a client's module.
    """

    trainer: L.Trainer | None = None
    forward_context: Autocast | None = None
    clipping: Clipping | None = None


class LocalSession:
    """Trains and evaluates clients one after the other in one module.

    The module is a group's, or an algorithm's own one for evaluation. `live` is its binding to
    rows, if it is trained, by the stepper.

    Attributes:
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
            module: Of a group, or an algorithm's own.
            runtime: Precision and clipping.
            live: The binding of the module to rows, if it is trained.
            stepper: Steps, unless sessions are Lightning fits.
            trainer: What the module sees as `self.trainer`, if sessions have one.
            configure: Makes the optimizers of a session that is a Lightning fit; None for others.
            transfers: A module or a data module overrides hooks that transfer batches.
            key: Of the group's model in the configuration.
        """
        self.module, self._live, self._stepper = module, live, stepper
        self._trainer = trainer
        self._position = Position() if trainer is None else trainer.position
        self._transfers = trainer if transfers else None
        self._context: Autocast = runtime.forward_context or nullcontext
        self._log = LogBook()
        self._stages: dict[Stage, StageHooks] = {}
        self._watched = False
        self.rates: SessionRates | None = None
        module.log = self._log.log  # type: ignore[method-assign]
        module.log_dict = self._log.log_dict  # type: ignore[method-assign, assignment]
        self._fit: ClientFit | None = None
        if trainer is not None:
            module.trainer = trainer
            trainer.precision_of_sessions.context = self._context
            clipping = runtime.clipping
            if clipping is not None:
                trainer.clips(clipping.limit, by_value=clipping.algorithm == "value")
        elif runtime.trainer is not None:
            module.trainer = runtime.trainer
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
        """Bounds that the optimiser projects parameters onto."""
        return None if self._stepper is None else self._stepper.box

    @on_this_rank
    def train(self, row: Row, work: Work) -> "PendingReport":
        """Train `row` in place."""
        assert self._live is not None, "this session only evaluates"
        stopwatch = Stopwatch(row.floats.device)
        if self._live.row is not row:
            self._live.bind(row)
        if not self.module.training:
            self.module.train()
        reset_metrics(self.module)
        seed_default_generators(work.seed, row.floats.device)
        frozen = {} if self._watched else digests(self._live.frozen)
        self._kept.begin(work.attributes)
        self._position.begin(first=work.first, epoch_batches=work.epoch_batches, total=work.total)
        try:
            with nullcontext() if self._trainer is None else self._trainer.in_stage("train"):
                pending = self._run(row, work)
        except BaseException:
            self._kept.end(None)  # what the client keeps is what it had before
            raise
        finally:
            self._position.active = False
        self._kept.end(work.attributes)
        if work.mask is not None:  # ASPG has put its iterate into the row
            apply_mask_(row.floats, work.mask)
        self._live.unbind()
        if not self._watched:  # the first session
            self._watched = True
            self._check_frozen(frozen)
        stopwatch.stop()
        pending.logged = self._log.close()
        # A dot product detects non-finite values as well as a maximum, ten times as fast.
        pending.square = torch.dot(row.floats, row.floats)
        pending.stopwatch = stopwatch
        return pending

    def _run(self, row: Row, work: Work) -> "PendingReport":
        """Train a bound row: as a Lightning fit, if hooks ask for it, or by the loop below."""
        if self._fit is not None:
            return PendingReport(work.client, *self._fit.run(row, work))
        assert self._live is not None
        assert self._stepper is not None, "this session only evaluates"
        module, stepper, book, context = self.module, self._stepper, self._log, self._context
        position, trainer = self._position, self._trainer or _NO_TRAINER
        trainable = self._live.trainable
        parameters = row.floats[: self._live.layout.parameter_size]
        epoch = work.epoch_batches
        losses: list[Tensor] = []
        sizes: list[int] = []
        values = [p.data for p in trainable]
        rates = self.rates
        stepper.reset(work.lr, parameters, work.proximal)
        trainer.should_stop = False
        try:
            for index, batch in enumerate(work.batches):
                position.batch = index
                if index in work.phases:
                    stepper.train_only(work.phases[index])
                book.batch_size = size = batch_size(batch)
                if rates is not None:
                    book.log_dict(rates.of([stepper.optimizer], stepper.schedulers))
                with context():
                    loss = _loss(module.training_step(batch, index % epoch))
                put_back(trainable, values)
                if loss is not None:
                    stepper.step(loss, work.hook)
                    if work.mask is not None:
                        put_back(trainable, values)
                        apply_mask_(row.floats, work.mask)
                    losses.append(loss.detach())
                    sizes.append(size)
                else:
                    stepper.skip()
                if (index + 1) % epoch == 0:
                    stepper.schedule("epoch")
                if trainer.should_stop:
                    break
        finally:
            stepper.finish()  # a kept row must hold a model even after a session that raised
        return PendingReport(work.client, losses, sizes, len(losses), position.batch + 1)

    def _check_frozen(self, before: Mapping[str, str]) -> None:
        """Refuse a step that has written a frozen parameter, which all clients share."""
        assert self._live is not None
        for name, own in before.items():
            found = f"a step writes {name}, which is frozen and the same for all clients"
            fix = "name it in `written` of its module, or make it a buffer"
            same = own == digest(self._live.frozen[name])
            require(same, "model.clients", found, fix)

    def _check_automatic(self) -> None:
        """Refuse to ask a module for its loss whose `training_step` would train it."""
        name = type(self.module).__name__
        found = f"{name} optimises manually, and the method asks for its losses outside of sessions"
        fix = "set automatic_optimization = True, or choose a method such as FedAvg"
        require(self.module.automatic_optimization, "model.clients", found, fix)

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
        """(P,) the gradient of a batch's loss at `row`, in eval mode; the row is unchanged.

        In full precision.
        """
        assert self._live is not None, "this session only evaluates"
        self._check_automatic()
        self._live.bind(row)
        self.module.eval()
        if self._transfers is not None:
            batch = self._transfers.moved(batch)
        self._log.batch_size = batch_size(batch)
        loss = _loss(self.module.training_step(batch, 0))
        gradient = torch.zeros_like(row.floats)
        if loss is not None:
            parameters = self._live.trainable
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            views = self._live.layout.floats.views(gradient)
            names = [name for name, p in self.module.named_parameters() if p.requires_grad]
            for name, grad in zip(names, found, strict=True):
                if grad is not None:
                    views[name].copy_(grad)
        self._log.clear()
        self._live.unbind()
        return gradient

    @on_this_rank
    @torch.no_grad()
    def loss(self, row: Row, batches: Iterable[Any]) -> tuple[float, int]:
        """The mean loss of batches at `row`, as of `gradient`, and their number of samples."""
        assert self._live is not None, "this session only evaluates"
        self._check_automatic()
        self._live.bind(row)
        self.module.eval()
        total, samples = 0.0, 0
        for index, batch in enumerate(batches):
            if self._transfers is not None:
                batch = self._transfers.moved(batch)
            self._log.batch_size = size = batch_size(batch)
            loss = _loss(self.module.training_step(batch, index))
            if loss is not None:
                total, samples = total + float(loss) * size, samples + size
        self._log.clear()
        self._live.unbind()
        return total / max(samples, 1), samples

    @on_this_rank
    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Any], *, client: int, batch: int = -1, first: int = 0
    ) -> Report:
        """Metrics of the module as currently bound, from its `validation_step` or `test_step`.

        `first` is the number of the first batch, if others are evaluated elsewhere.
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
        """The number of samples of a batch, which counts for what the module logs next."""
        self._log.batch_size = size = batch_size(batch)
        return size

    def forget(self) -> None:
        """Discard what an evaluation that raised has logged."""
        self._log.clear()


class SessionReport(Protocol):
    """A report of a session, alone or in a pack, whose numbers may still be on the device."""

    flops: Any  # a number, or a tensor on the device

    @property
    def steps(self) -> int:
        """Optimizer steps."""

    def sources(self) -> list[Pending]:
        """What has to be read from the device before `resolve` is called."""

    def resolve(self) -> Report:
        """The report, with numbers of the host."""


@dataclass
class PendingReport:
    """A report whose numbers may still be on the device: `utils/reading.py` reads those of all."""

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
        """What has to be read from the device before `resolve` is called."""
        return [self]

    def pending(self) -> list[Tensor]:
        """The tensors whose values `resolve` reads."""
        values = [*self.losses, self.square, *self.logged.values(), self.flops]
        return [value for value in values if isinstance(value, Tensor)]

    def receive(self, values: Sequence[Tensor]) -> None:
        """Take the values of `pending` on the host."""
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
        samples = sum(self.sizes)
        metrics = numbers(self.logged)
        if self.losses and len(self.losses) == len(self.sizes):
            losses = [loss.item() for loss in self.losses]
            weighted = sum(x * n for x, n in zip(losses, self.sizes, strict=True))
            metrics.setdefault("train_loss", weighted / samples)
        norm, flops = float(self.square) ** 0.5, float(self.flops)
        assert self.stopwatch is not None
        seconds = self.stopwatch.seconds()  # the norm was computed later, so the events are done
        return Report(
            self.client, samples, self.steps, metrics, norm,
            flops=flops, seconds=seconds, updates=self.updates,
        )  # fmt: skip


def _loss(output: Any) -> Tensor | None:
    """The loss that a `training_step` returns, also as {"loss": ...}, or None to skip the batch."""
    return output["loss"] if isinstance(output, dict) else output
