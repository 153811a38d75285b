"""The local training of K clients of one group at once: a pack.

Which clients form a pack follows from the configuration and the round alone, so all operators see
the same shapes on any number of ranks.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from lightfed_kernels import apply_mask_, unpack_mask
from torch import Tensor, nn
from typing_extensions import override

from lightfed.data.batches import PackBatches, sent
from lightfed.local.logbook import check_mean, on_this_rank, reset_metrics
from lightfed.local.optimizer import Clipping, Proximal
from lightfed.local.session import Autocast, Report, Work
from lightfed.models.client_module import ClientModule
from lightfed.packs import stacked
from lightfed.packs.stacked import Views
from lightfed.packs.stacked_optimizer import StackedOptimizer, clipped
from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.rng import seed_default_generators
from lightfed.utils.stopwatch import Stopwatch, Timings


@dataclass(frozen=True)
class PackWork:
    """The work of K sessions; those with the most batches come first.

    Attributes:
        clients: their numbers.
        batches: of the sessions.
        works: hooks, masks and pulls of each; none if nothing looks at single sessions.
        seed: of dropout and other draws.
        lr: learning rate of the round; None keeps the optimiser's own.
        own: (K, ...) the clients' values of buffers that are not in a row, by name.
        shared: such buffers that are the same for all.
        phases: the parameters trained from a batch on, by its index.
        timings: of this rank.
        epoch_batches: of a local epoch, where a step is told the number of its batch.
    """

    clients: Sequence[int]
    batches: PackBatches
    works: Sequence[Work]
    seed: int
    lr: float | None
    own: Views
    shared: Views
    phases: Mapping[int, Sequence[Tensor]]
    timings: Timings
    epoch_batches: int


class PackForward:
    """Losses of K clients on a batch of each, and their gradients.

    Args:
        module: a classifier with a loss of its own (`ClientModule`), or any other.
        layout: of its rows.
        context: of the Trainer's precision.
        known: all layers are known by their types.

    Attributes:
        epoch_batches: of a local epoch, in which a step's batches are counted; 0 to count them in
            the session.
    """

    epoch_batches = 0

    def __init__(
        self,
        module: L.LightningModule,
        layout: ModelLayout,
        context: Autocast | None,
        *,
        known: bool = False,
    ) -> None:
        self._known = known
        self._module, self._step = module, _TrainingStep(module)
        self._classifies = has_known_loss(module)
        self._context: Autocast = context or nullcontext
        self._ones = torch.empty(0)  # (K,) the gradient of the losses
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        self.trained = [e.name for e in layout.floats if e.name in trained]
        self.buffers = [name for name, _ in module.named_buffers()]

    def __call__(
        self,
        values: Views,
        shared: Views,
        leaves: Sequence[Tensor],
        batch: tuple[Tensor, Tensor],
        index: int,
        sizes: Tensor | None = None,
        randomness: str = "different",
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None]]:
        """(K,) losses, what the module logged, and the gradients of the leaves among the values.

        Args:
            values: (K, *shape) by name; buffers are updated.
            shared: buffers that are the same for all.
            leaves: those to differentiate.
            batch: (K, B, ...) inputs and labels.
            index: of the batch in its session.
            sizes: (K,) samples of each client, if they differ: the others have no weight. Only for
                modules with a known loss.
            randomness: as of `torch.func.vmap`.
        """
        runs = self._module if self._classifies else self._step
        if index == 0:  # a callback may have changed layers since the last session
            prefix = "" if self._classifies else "module."
            names = [*values, *shared]
            self._places = stacked.Places(runs, names, prefix, known=self._known)
        forward = partial(
            stacked.forward, runs, values, shared=shared, places=self._places, randomness=randomness
        )
        with self._context():
            if self._classifies:
                logits = forward(batch[0])
                losses, logged = _cross_entropies(logits, batch[1], sizes), {}
            else:
                self._step.index = index % self.epoch_batches if self.epoch_batches else index
                losses, logged = forward(batch)
        if self._ones.shape != losses.shape or self._ones.dtype != losses.dtype:
            self._ones = torch.ones_like(losses)
        grads = torch.autograd.grad(losses, leaves, self._ones, allow_unused=True)
        return losses.detach(), logged, list(grads)


class PackSession:
    """Trains K clients in one module, which keeps its own values.

    Args:
        module: of the group.
        layout: of its rows.
        optimizer: of K clients.
        clipping: of each client's gradients.
        context: of the Trainer's precision.
        known: all layers are known by their types.

    Attributes:
        optimizer: as given.
    """

    def __init__(
        self,
        module: L.LightningModule,
        layout: ModelLayout,
        optimizer: StackedOptimizer,
        *,
        clipping: Clipping | None,
        context: Autocast | None,
        known: bool,
    ) -> None:
        self._module, self._layout = module, layout
        self.optimizer, self._clipping = optimizer, clipping
        self._forward = PackForward(module, layout, context, known=known)
        self._span = layout.parameter_size
        self._where = {e.name: e for e in layout.floats}

    @on_this_rank
    def train(self, rows: Row, work: PackWork) -> "PackResult":
        """Train K rows, (K, P) and (K, Q), in place, in the order of the clients."""
        device = rows.floats.device
        stopwatch = Stopwatch(device)
        self._module.train()
        reset_metrics(self._module)
        seed_default_generators(work.seed, device)
        sizes, optimizer, names = work.batches.sizes, self.optimizer, self._forward.trained
        whole = stacked.gather(self._layout, rows, self._module) | work.own
        self._forward.epoch_batches = work.epoch_batches
        pulls = _Pulls(self, rows, work)
        optimizer.start([whole[n] for n in names], lr=work.lr, momenta=pulls.momenta)
        masks = self._masks(work, rows)
        hooks = _Hooks(self, rows, work)
        result = PackResult(work.clients, sizes, stopwatch, _Sizes(sizes, device))
        batches = iter(work.batches)
        counts, values = (sizes > 0).sum(0).tolist(), dict(whole)
        values |= dict(zip(names, optimizer.leaves, strict=True))
        chosen: Sequence[int] = range(len(names))
        for step, active in enumerate(counts):
            if step in work.phases:
                chosen = self._chosen(work.phases[step])
            if active < len(optimizer.leaves[0]):
                optimizer.narrow(active)
                values |= {name: whole[name][:active] for name in whole.keys() - {*names}}
            with work.timings.part("data"):
                batch = next(batches)
            before = {name: values[name] for name in self._forward.buffers if name in values}
            leaves = [optimizer.leaves[i] for i in chosen]
            losses, logged, found = self._forward(
                values, work.shared, leaves, batch, step, result.on_device.unequal(step, active)
            )
            for name, held in before.items():  # what the module has put in its place
                if values[name] is not held:
                    values[name] = held.copy_(values[name])
            grads: list[Tensor | None] = [None] * len(names)
            with torch.no_grad():
                used = [i for i, grad in zip(chosen, found, strict=True) if grad is not None]
                given = hooks.changed([g for g in found if g is not None], used, whole)
                given = pulls.added(given, used, optimizer.leaves)
                if self._clipping is not None:
                    given = clipped(self._clipping, given, used)
                given = pulls.decayed(given, used, optimizer.leaves)
                for i, grad in zip(used, given, strict=True):
                    grads[i] = grad
                optimizer.step(grads)
                for i, mask in enumerate(masks):
                    optimizer.leaves[i].masked_fill_(mask[:active], 0)
            result.note(losses, logged, step)
        optimizer.finish()
        pulls.keep()
        stacked.scatter(self._layout, whole, rows)
        for row, own in zip(rows.floats, work.works, strict=False):
            if own.mask is not None:  # ASPG has put its iterates into the rows
                apply_mask_(row, own.mask)
        stopwatch.stop()
        result.norms = torch.linalg.vector_norm(rows.floats, dim=1)
        return result

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """The trained parameters in a (K, P) matrix, as (K, *shape) views."""
        found = [self._where[name] for name in self._forward.trained]
        return [matrix[:, e.offset : e.offset + e.numel].view(len(matrix), *e.shape) for e in found]

    def _chosen(self, parameters: Sequence[Tensor]) -> Sequence[int]:
        """The positions of some parameters of the module."""
        chosen, named = {id(p) for p in parameters}, dict(self._module.named_parameters())
        return [i for i, n in enumerate(self._forward.trained) if id(named[n]) in chosen]

    def _masks(self, work: PackWork, rows: Row) -> list[Tensor]:
        """What the clients' masks do not cover, (K, *shape) of each parameter; none without."""
        if all(own.mask is None for own in work.works):
            return []
        uncovered = torch.zeros_like(rows.floats, dtype=torch.bool)
        for row, own in zip(uncovered, work.works, strict=True):
            if own.mask is not None:
                row.copy_(unpack_mask(own.mask)).logical_not_()
        return [part.contiguous() for part in self.parts(uncovered)]


class _Hooks:
    """The algorithm's changes to gradients, each in a row of its client's own (P,)."""

    def __init__(self, session: PackSession, rows: Row, work: PackWork) -> None:
        self._hooks = [own.hook for own in work.works if own.hook is not None]  # of all, or none
        if self._hooks:
            span = session._span
            self._flat = torch.zeros_like(rows.floats[:, :span])
            self._parts = session.parts(self._flat)
            self._names, self._rows = session._forward.trained, session.parts(rows.floats)

    def changed(self, grads: list[Tensor], used: Sequence[int], whole: Views) -> list[Tensor]:
        if not self._hooks:
            return grads
        for row, name in zip(self._rows, self._names, strict=True):
            row.copy_(whole[name])  # hooks read where the gradient was taken
        if len(used) < len(self._parts):
            self._flat.zero_()
        active = len(grads[0])
        parts = [self._parts[i][:active] for i in used]
        for part, grad in zip(parts, grads, strict=True):
            part.copy_(grad)
        for hook, flat in zip(self._hooks[:active], self._flat, strict=False):
            hook(flat)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]


class _Pulls:
    """The clients' pulls towards other models, and the momenta that they carry."""

    def __init__(self, session: PackSession, rows: Row, work: PackWork) -> None:
        self._session, self._parameters = session, rows.floats[:, : session._span]
        self._anchors: list[Tensor] = []
        self._decays: list[Tensor] = []
        self._pulls: list[Proximal] = []
        self.momenta: list[Tensor] | None = None
        if all(own.proximal is None for own in work.works):
            return
        pairs = zip(work.works, self._parameters, strict=True)
        self._pulls = [own.proximal or Proximal(row, 0.0) for own, row in pairs]
        if any(pull.gamma for pull in self._pulls):
            anchors = torch.stack([pull.anchor for pull in self._pulls])
            self._anchors = [part.contiguous() for part in session.parts(anchors)]
            gammas = torch.tensor([pull.gamma for pull in self._pulls])
            self._gammas = sent(gammas, anchors.device)
        if any(pull.decay is not None for pull in self._pulls):
            decays = torch.zeros_like(self._parameters)
            for pull, decay in zip(self._pulls, decays, strict=True):
                if pull.decay is not None:
                    decay.copy_(pull.decay)
            self._decays = [part.contiguous() for part in session.parts(decays)]
        if any(pull.momentum is not None for pull in self._pulls):
            momenta = torch.zeros_like(self._parameters)
            for pull, momentum in zip(self._pulls, momenta, strict=True):
                if pull.momentum is not None:
                    momentum.copy_(pull.momentum)
            self.momenta = [part.contiguous() for part in session.parts(momenta)]

    def added(
        self, grads: list[Tensor], used: Sequence[int], leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """The gradients with gamma (w - anchor)."""
        if not self._anchors:
            return grads
        active = len(grads[0])
        values = [leaves[i] for i in used]
        away = torch._foreach_sub(values, [self._anchors[i][:active] for i in used])
        gammas = [self._gammas[:active].view(-1, *[1] * (x.dim() - 1)) for x in away]
        torch._foreach_mul_(away, gammas)
        return list(torch._foreach_add(grads, list(away)))

    def decayed(
        self, grads: list[Tensor], used: Sequence[int], leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """The gradients with the decay of the parameters."""
        if not self._decays:
            return grads
        active = len(grads[0])
        values = [leaves[i] for i in used]
        return list(torch._foreach_addcmul(grads, values, [self._decays[i][:active] for i in used]))

    def keep(self) -> None:
        """Keep what the optimiser carries to the clients' next sessions."""
        if not any(pull.carries for pull in self._pulls):
            return
        carried = self._session.optimizer.carried()
        momenta = torch.zeros_like(self._parameters)
        for part, momentum in zip(self._session.parts(momenta), carried, strict=True):
            if momentum is not None:
                part[: len(momentum)].copy_(momentum)
        if any(momentum is not None for momentum in carried):
            for pull, row in zip(self._pulls, momenta, strict=True):
                if pull.carries:
                    pull.momentum = row.clone()


def has_known_loss(module: L.LightningModule) -> bool:
    """Whether its loss is the cross-entropy of what it returns."""
    return type(module) is ClientModule and not hasattr(module.net, "losses")


class _Sizes:
    """The samples of every batch of a pack, (K, steps), on its device: sent once, if at all."""

    def __init__(self, sizes: np.ndarray, device: torch.device) -> None:
        self._sizes, self._device = sizes, device

    @cached_property
    def _rows(self) -> Tensor:
        """(steps, K)."""
        return sent(torch.from_numpy(np.ascontiguousarray(self._sizes.T)), self._device)

    def of(self, step: int, active: int) -> Tensor:
        """(k,) the samples of the first clients' batches."""
        return self._rows[step, :active]

    def unequal(self, step: int, active: int) -> Tensor | None:
        """As `of`, or None if all of them have as many."""
        sizes = self._sizes[:active, step]
        return None if (sizes == sizes[0]).all() else self.of(step, active)


def _cross_entropies(logits: Tensor, labels: Tensor, sizes: Tensor | None) -> Tensor:
    """(K,) mean losses of (K, B, C) logits, of the first `sizes` samples of each client."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.view(labels.shape)
    if sizes is None:
        return losses.mean(1)
    weights = torch.arange(labels.shape[1], device=labels.device) < sizes[:, None]
    return (losses * weights).sum(1) / sizes


class _TrainingStep(nn.Module):
    """`training_step` as a forward pass; returns the loss and what the step logged."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module
        self.index = 0

    @override
    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logged: dict[str, Tensor] = {}
        own = self.module.log, self.module.log_dict
        self.module.log = partial(_note, logged)  # type: ignore[method-assign]
        self.module.log_dict = partial(_note_all, logged)  # type: ignore[method-assign]
        try:
            output = self.module.training_step(batch, self.index)
        finally:
            self.module.log, self.module.log_dict = own  # type: ignore[method-assign]
        loss: Any = output["loss"] if isinstance(output, dict) else output
        if loss is None:
            raise NotImplementedError("a training_step that skips batches")
        return loss.reshape(()), logged


def _note(logged: dict[str, Tensor], name: str, value: Any, *_: Any, **options: Any) -> None:
    """`self.log` of a step of K clients: plain numbers only."""
    check_mean(name, options)
    if options.get("batch_size") is not None or name in logged:
        raise NotImplementedError(f"self.log of {name} twice, or with a batch_size")
    if not isinstance(value, Tensor | int | float):
        raise NotImplementedError(f"self.log of a {type(value).__name__}")
    logged[name] = torch.as_tensor(value).detach().reshape(())


def _note_all(
    logged: dict[str, Tensor], values: Mapping[str, Any], *_: Any, **options: Any
) -> None:
    for name, value in values.items():
        _note(logged, name, value, **options)


@dataclass
class PackResult:
    """What K sessions report; the numbers may still be on the device.

    Attributes:
        clients: in the order of their rows.
        sizes: (K, steps) samples of the batches; 0 after a client's last one.
        stopwatch: of the pack.
        on_device: the sizes, where the losses are.
        losses: of each step, (k,) of the clients that had a batch.
        logged: what the modules logged, by name: (K,) sums over samples.
        counts: (K,) numbers of these samples, by name.
        norms: (K,) of the trained rows.
    """

    clients: Sequence[int]
    sizes: np.ndarray
    stopwatch: Stopwatch
    on_device: _Sizes
    losses: list[Tensor] = field(default_factory=list)
    logged: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    norms: Tensor = field(default_factory=lambda: torch.empty(0))

    def note(self, losses: Tensor, logged: Mapping[str, Tensor], step: int) -> None:
        """Add the numbers of a step."""
        active = len(losses)
        self.losses.append(losses)
        for name, values in logged.items():
            if name not in self.logged:
                # In float64: float32 stops counting samples at 2^24.
                self.logged[name] = values.new_zeros(len(self.clients), dtype=torch.float64)
                self.counts[name] = np.zeros(len(self.clients), np.int64)
            self.logged[name][:active] += values.double() * self.on_device.of(step, active)
            self.counts[name][:active] += self.sizes[:active, step]

    def pending(self) -> list[Tensor]:
        """The tensors whose values `reports` reads."""
        return [*self.losses, self.norms, *self.logged.values()]

    def receive(self, values: Sequence[Tensor]) -> None:
        """Take the values of `pending` on the host."""
        arrived = iter(values)
        self.losses = [next(arrived) for _ in self.losses]
        self.norms = next(arrived)
        self.logged = {name: next(arrived) for name in self.logged}

    @cached_property
    def reports(self) -> list[Report]:
        """Of each client."""
        samples, steps = self.sizes.sum(1), (self.sizes > 0).sum(1)
        losses = np.zeros(self.sizes.shape)
        for step, values in enumerate(self.losses):
            losses[: len(values), step] = values.float().numpy()
        means = (losses * self.sizes).sum(1) / samples
        seconds = self.stopwatch.seconds() / len(samples)
        columns = zip(
            self.clients, samples.tolist(), steps.tolist(), self.norms.tolist(), means.tolist(),
            strict=True,
        )  # fmt: skip
        found = [
            Report(client, count, n, {"train_loss": loss}, norm, updates=n, seconds=seconds)
            for client, count, n, norm, loss in columns
        ]
        for name, sums in self.logged.items():
            counts = self.counts[name].tolist()
            for report, value, count in zip(found, sums.tolist(), counts, strict=True):
                if count:
                    report.metrics[name] = value / count
        return found


@dataclass
class LaneReport:
    """The report of one client of a pack; `utils/reading.py` has its values come to the host."""

    result: PackResult
    lane: int
    flops: Tensor | float

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return int((self.result.sizes[self.lane] > 0).sum())

    def pending(self) -> list[Tensor]:
        """The tensors that `resolve` reads besides those of the pack."""
        return [self.flops] if isinstance(self.flops, Tensor) else []

    def receive(self, values: Sequence[Tensor]) -> None:
        """Take the values of `pending` on the host."""
        for value in values:
            self.flops = value

    def resolve(self) -> Report:
        report = self.result.reports[self.lane]
        report.flops = float(self.flops)
        return report
