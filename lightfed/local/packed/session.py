"""The local training of K clients of one group, side by side.

A client's bits depend neither on K nor on the other clients: every operator acts on each client's
part alone, and a pack smaller than the `floor` is padded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from lightfed_kernels import apply_mask_
from torch import Tensor

from lightfed.data.batches import PackBatches
from lightfed.local.logbook import reset_metrics
from lightfed.local.optimizer import GradientHook, Proximal
from lightfed.local.packed.forward import Losses, PackedForward, Views
from lightfed.local.packed.operators import aligned
from lightfed.local.packed.report import PackResult
from lightfed.local.packed.steppers import PackedStepper
from lightfed.local.session import Autocast
from lightfed.state.rows import LiveModule, Row
from lightfed.utils.memory import sent
from lightfed.utils.rng import Streams, streams
from lightfed.utils.stopwatch import Stopwatch, Timings


@dataclass
class Members:
    """The clients of a pack; those with the most batches first.

    Attributes:
        clients: their numbers.
        batches: of their sessions.
        seed: of a client's dropout, by its number.
        hooks: the algorithm's change to the gradients of each.
        masks: of each, packed words (P / 32,); uncovered elements are 0 after every step.
        proximals: pull of each towards another model.
        buffers: (K, ...) the clients' values of buffers that are not in a row, by name; those after
            the session in the end.
        phases: the parameters trained from a batch on, by its index.
        timings: of this rank.
        device: of the rows.
    """

    clients: Sequence[int]
    batches: PackBatches
    seed: Callable[[int], int]
    hooks: Sequence[GradientHook | None]
    masks: Sequence[Tensor | None]
    proximals: Sequence[Proximal | None]
    buffers: Views
    phases: Mapping[int, Sequence[Tensor]]
    timings: Timings
    device: torch.device

    @cached_property
    def draws(self) -> Streams:
        """Of dropout, on a CPU those of a session of one client."""
        return streams([self.seed(client) for client in self.clients], self.device)


class PackedSession:
    """Trains K clients in one module.

    Args:
        live: the group's module.
        stepper: of K rows.
        context: of the Trainer's precision.
        floor: fewest clients whose operators have the bits of any larger number.
    """

    def __init__(
        self, live: LiveModule, stepper: PackedStepper, *, context: Autocast | None, floor: int
    ) -> None:
        module: Any = live.module
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        self._module = module
        self._layout = live.layout
        self._forward = PackedForward(module, live.layout, trained, context=context)
        self._stepper = stepper
        self._floor = floor

    def train(
        self,
        rows: Row,
        members: Members,
        *,
        lr: float | None,
        shared: Views,
    ) -> PackResult:
        """Train K rows in place.

        Args:
            rows: (K, P) and (K, Q), in the order of the members.
            members: the clients.
            lr: learning rate of the round; None keeps the optimiser's own.
            shared: buffers that are neither in a row nor a client's own.
        """
        stopwatch = Stopwatch(rows.floats.device)
        if not self._module.training:
            self._module.train()
        reset_metrics(self._module)
        pack = _Pack(self._forward, rows, members, shared, floor=self._floor)
        layout = self._layout
        parameters = rows.floats[:, : layout.floats.span(layout.parameters)]
        self._stepper.reset(
            parameters,
            self._forward.trainable(pack.views),
            lr=lr,
            proximals=members.proximals,
            hooks=members.hooks,
        )
        masked = [(i, mask) for i, mask in enumerate(members.masks) if mask is not None]
        sizes = members.batches.sizes
        try:
            for step, active in enumerate((sizes > 0).sum(0).tolist()):
                if step in members.phases:
                    self._forward.train_only(members.phases[step])
                    self._stepper.train_only(members.phases[step])
                gradients = pack.gradients(step, active)
                self._stepper.step(gradients, active)
                for place, mask in masked:
                    if place < active:
                        apply_mask_(rows.floats[place], mask)
        finally:
            self._forward.train_only(None)
            self._stepper.finish()
        pack.put_buffers_back()
        stopwatch.stop()
        norms = torch.linalg.vector_norm(rows.floats, dim=1)
        return PackResult(members.clients, sizes, pack.losses, pack.logged, norms, stopwatch)


class _Pack:
    """The tensors of one pack's session.

    Attributes:
        views: (K, *shape) by name; parameters are views of the rows.
        losses: (K, steps) so far.
        logged: (2, K) sums over samples so far, and numbers of samples.
    """

    def __init__(
        self,
        forward: PackedForward,
        rows: Row,
        members: Members,
        shared: Views,
        *,
        floor: int,
    ) -> None:
        self._forward, self._members, self._shared = forward, members, shared
        self._floor = floor
        self.views = forward.views(rows.floats, rows.integers)
        # Batch normalisation under vmap updates only statistics that are contiguous.
        self._buffers = {
            name: (self.views[name], self.views[name].contiguous().to(dtype))
            for name, dtype in forward.buffers.items()
        }
        self.views |= {name: copied for name, (_, copied) in self._buffers.items()}
        self.views |= members.buffers
        self.losses = rows.floats.new_zeros(members.batches.sizes.shape)
        self.logged: dict[str, Tensor] = {}

    def gradients(self, step: int, active: int) -> Sequence[Tensor | None]:
        """(active, *shape) gradients of one batch of each active client."""
        sizes = self._members.batches.sizes[:active, step]
        kinds = np.unique(sizes).tolist()
        if len(kinds) == 1 and active >= self._floor:
            found = self._losses(self._first(active), range(active), step)
            self._note(slice(0, active), found, step, *kinds)
            return found.gradients
        whole: list[Tensor | None] = []
        for size in kinds:
            places = np.flatnonzero(sizes == size).tolist()
            index = sent(torch.tensor(places), self.losses.device)
            padded = [*places, *[places[-1]] * (self._floor - len(places))]
            taken = self._take(sent(torch.tensor(padded), self.losses.device))
            found = self._losses(taken, padded, step, real=len(places))
            self._keep_buffers(taken, index)
            self._note(index, found, step, size)
            whole = _scattered(whole, found.gradients, index, active)
        return whole

    def _losses(
        self,
        views: Views,
        places: Sequence[int],
        step: int,
        *,
        real: int | None = None,
    ) -> Losses:
        with self._members.timings.part("data"):
            batch = self._members.batches.batch(places, step)
        draws = cache(lambda: self._members.draws.part(places, real))
        return self._forward.losses(views, batch, step, shared=self._shared, draws=draws, real=real)

    def _first(self, clients: int) -> Views:
        if clients == len(self.losses):
            return self.views
        return {name: view[:clients] for name, view in self.views.items()}

    def _take(self, index: Tensor) -> Views:
        """Copies of some clients' values; parameters at aligned addresses, as in rows."""
        taken = {name: view.index_select(0, index) for name, view in self.views.items()}
        kept = {*self._buffers, *self._members.buffers}  # statistics have to be contiguous
        return {name: part if name in kept else aligned(part) for name, part in taken.items()}

    def _keep_buffers(self, taken: Views, index: Tensor) -> None:
        """Copy the buffers of some clients back after their step, without the padding's."""
        for name in [*self._buffers, *self._members.buffers]:
            self.views[name].index_copy_(0, index, taken[name][: len(index)])

    def _note(self, places: Tensor | slice, found: Losses, step: int, size: int) -> None:
        """Add the numbers of a step."""
        self.losses[places, step] = found.values.to(self.losses.dtype)
        for name, values in found.logged.items():
            if name not in self.logged:
                self.logged[name] = torch.zeros(
                    2, len(self.losses), dtype=torch.float32, device=values.device
                )
            self.logged[name][0, places] += values * size
            self.logged[name][1, places] += size

    def put_buffers_back(self) -> None:
        """Write the buffers into the rows."""
        for row, buffer in self._buffers.values():
            row.copy_(buffer)


def _scattered(
    whole: list[Tensor | None], found: Sequence[Tensor | None], index: Tensor, clients: int
) -> list[Tensor | None]:
    """Put the gradients of some clients into those of all."""
    if not whole:
        whole = [None if g is None else g.new_zeros(clients, *g.shape[1:]) for g in found]
    for target, source in zip(whole, found, strict=True):
        if (target is None) != (source is None):
            raise NotImplementedError("a loss that uses other parameters for other batch sizes")
        if target is not None and source is not None:
            target.index_copy_(0, index, source)
    return whole
