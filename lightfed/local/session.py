"""A session: one client's local training in one round, without a Trainer of its own.

On small models Lightning's inner loops cost three to four times as much as a bare torch loop. This
one is a bare loop plus precision, clipping, schedulers and `self.log`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
from lightfed_kernels import apply_mask_
from torch import Tensor

from lightfed.local.logbook import LogBook, batch_size, numbers, on_this_rank, reset_metrics
from lightfed.local.optimizer import Clipping, GradientHook, Proximal, Stepper
from lightfed.models.attributes import attributes, warn_of_changed
from lightfed.state.frozen_base import digest, digests
from lightfed.state.rows import LiveModule, Row, put_back
from lightfed.utils.errors import require
from lightfed.utils.rng import seed_default_generators
from lightfed.utils.stopwatch import Stopwatch

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass
class Report:
    """The report of a session or an evaluation; sent between ranks.

    Attributes:
        client: number of the client; -1 for the global model.
        samples: samples processed (a sample counts once per epoch).
        steps: optimiser steps.
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
    seconds: float = field(default=0.0, compare=False)

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
    """

    def __init__(
        self,
        module: L.LightningModule,
        runtime: Runtime,
        *,
        live: LiveModule | None = None,
        stepper: Stepper | None = None,
    ) -> None:
        self.module, self._live, self._stepper = module, live, stepper
        self._context: Autocast = runtime.forward_context or nullcontext
        self._log = LogBook()
        self._watched = False
        module.log = self._log.log  # type: ignore[method-assign]
        module.log_dict = self._log.log_dict  # type: ignore[method-assign, assignment]
        if runtime.trainer is not None:
            module.trainer = runtime.trainer

    @property
    def box(self) -> tuple[float, float] | None:
        """Bounds that the optimiser projects parameters onto."""
        return None if self._stepper is None else self._stepper.box

    @on_this_rank
    def train(self, row: Row, work: Work) -> "PendingReport":
        """Train `row` in place."""
        assert self._live is not None, "this session only evaluates"
        assert self._stepper is not None, "this session only evaluates"
        stopwatch = Stopwatch(row.floats.device)
        module, stepper, book, context = self.module, self._stepper, self._log, self._context
        if self._live.row is not row:
            self._live.bind(row)
        if not module.training:
            module.train()
        reset_metrics(module)
        seed_default_generators(work.seed, row.floats.device)
        left = None if self._watched else attributes(module)
        frozen = {} if self._watched else digests(self._live.frozen)
        layout, trainable = self._live.layout, self._live.trainable
        parameters = row.floats[: layout.parameter_size]
        losses: list[Tensor] = []
        sizes: list[int] = []
        values = [p.data for p in trainable]
        stepper.reset(work.lr, parameters, work.proximal)
        try:
            for index, batch in enumerate(work.batches):
                if index in work.phases:
                    stepper.train_only(work.phases[index])
                book.batch_size = size = batch_size(batch)
                with context():
                    loss = _loss(module.training_step(batch, index))
                put_back(trainable, values)
                if loss is not None:
                    stepper.step(loss, work.hook)
                    if work.mask is not None:
                        put_back(trainable, values)
                        apply_mask_(row.floats, work.mask)
                    losses.append(loss.detach())
                    sizes.append(size)
                if (index + 1) % work.epoch_batches == 0:
                    stepper.schedule("epoch")
        finally:
            stepper.finish()  # a kept row must hold a model even after a session that raised
        if work.mask is not None:  # ASPG has put its iterate into the row
            apply_mask_(row.floats, work.mask)
        self._live.unbind()
        if left is not None:  # of the first session
            self._watched = True
            warn_of_changed(module, left)
            for name, before in frozen.items():
                found = f"a step writes {name}, which is frozen and the same for all clients"
                fix = "name it in `written` of its module, or make it a buffer"
                same = before == digest(self._live.frozen[name])
                require(same, "model.clients", found, fix)
        stopwatch.stop()
        # A dot product detects non-finite values as well as a maximum, ten times as fast.
        square = torch.dot(row.floats, row.floats)
        return PendingReport(work.client, losses, sizes, book.close(), square, stopwatch)

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
        self._live.bind(row)
        self.module.eval()
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
        self._live.bind(row)
        self.module.eval()
        total, samples = 0.0, 0
        for index, batch in enumerate(batches):
            self._log.batch_size = size = batch_size(batch)
            loss = _loss(self.module.training_step(batch, index))
            if loss is not None:
                total, samples = total + float(loss) * size, samples + size
        self._log.clear()
        self._live.unbind()
        return total / max(samples, 1), samples

    @on_this_rank
    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any], *, client: int, batch: int = -1) -> Report:
        """Metrics of the module as currently bound, from its `validation_step`."""
        reset_metrics(self.module)
        samples = 0
        for index, data in enumerate(batches):
            self._log.batch_size = size = batch_size(data)
            with self._context():
                self.module.validation_step(data, index)
            samples += size
        return Report(client, samples, metrics=numbers(self._log.close()), batch=batch)

    def forget(self) -> None:
        """Discard what an evaluation that raised has logged."""
        self._log.clear()


@dataclass
class PendingReport:
    """A report whose numbers may still be on the device: `utils/reading.py` reads those of all."""

    client: int
    losses: list[Tensor]
    sizes: list[int]
    logged: dict[str, Tensor | float]
    square: Tensor
    stopwatch: Stopwatch
    flops: Tensor | float = 0.0

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return len(self.losses)

    def pending(self) -> list[Tensor]:
        """The tensors whose values `resolve` reads."""
        logged = [value for value in self.logged.values() if isinstance(value, Tensor)]
        flops = [self.flops] if isinstance(self.flops, Tensor) else []
        return [*self.losses, self.square, *logged, *flops]

    def receive(self, values: Sequence[Tensor]) -> None:
        """Take the values of `pending` on the host."""
        arrived = iter(values)
        self.losses = [next(arrived) for _ in self.losses]
        self.square = next(arrived)
        for name, value in self.logged.items():
            if isinstance(value, Tensor):
                self.logged[name] = next(arrived)
        if isinstance(self.flops, Tensor):
            self.flops = next(arrived)

    def resolve(self) -> Report:
        samples = sum(self.sizes)
        metrics = numbers(self.logged)
        if samples:
            losses = [loss.item() for loss in self.losses]
            weighted = sum(x * n for x, n in zip(losses, self.sizes, strict=True))
            metrics.setdefault("train_loss", weighted / samples)
        norm, flops = float(self.square) ** 0.5, float(self.flops)
        seconds = self.stopwatch.seconds()  # the norm was computed later, so the events are done
        return Report(self.client, samples, self.steps, metrics, norm, flops=flops, seconds=seconds)


def _loss(output: Any) -> Tensor | None:
    """The loss that a `training_step` returns, also as {"loss": ...}, or None to skip the batch."""
    return output["loss"] if isinstance(output, dict) else output
