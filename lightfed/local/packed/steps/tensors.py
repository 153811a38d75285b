"""The tensors of K sessions that train side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from lightfed.data.batches import PackBatches
from lightfed.local.optimizer import GradientHook, Proximal
from lightfed.local.packed.forward import Losses, PackedForward, Views
from lightfed.local.packed.operators import aligned
from lightfed.state.rows import Row
from lightfed.utils.memory import sent
from lightfed.utils.rng import Streams, streams
from lightfed.utils.stopwatch import Timings

_PACKED = torch.contiguous_format


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


class PackTensors:
    """The tensors of K sessions.

    Args:
        forward: of the group.
        rows: (K, P) and (K, Q), trained in place.
        members: the clients; no more than rows.
        buffers: (K, ...) values of buffers that are not in a row, by name, changed in place.
        shared: buffers that are neither in a row nor a client's own.
        steps: the most batches of a session.
        floor: fewest clients whose operators have the bits of any larger number.

    Attributes:
        rows, members, buffers, shared: as given.
        views: (K, *shape) by name; parameters are views of the rows.
        losses: (K, steps) so far.
        logged: (2, K) sums over samples so far, and numbers of samples.
    """

    def __init__(
        self,
        forward: PackedForward,
        rows: Row,
        members: Members,
        buffers: Views,
        shared: Views,
        *,
        steps: int,
        floor: int,
    ) -> None:
        self.rows, self.members, self.buffers, self.shared = rows, members, buffers, shared
        self._forward, self._floor = forward, floor
        self.views = forward.views(rows.floats, rows.integers)
        # Batch normalisation under vmap updates only statistics that are contiguous.
        self._buffers = {
            name: (view := self.views[name], view.clone(memory_format=_PACKED).to(dtype))
            for name, dtype in forward.buffers.items()
        }
        self.views |= {name: copied for name, (_, copied) in self._buffers.items()}
        self.views |= buffers
        # A user's step may write into parameters too, as a mean teacher does.
        self._written = [*self._buffers, *buffers] if forward.by_graph else [*self.views]
        self.losses = rows.floats.new_zeros(len(rows.floats), steps)
        self.logged: dict[str, Tensor] = {}

    def load(self, rows: Row, members: Members, shared: Views) -> None:
        """Begin other sessions, of as many clients or fewer."""
        clients = len(rows.floats)
        self.members = members
        self.rows.first(clients).copy_(rows)
        for view, buffer in self._buffers.values():
            buffer[:clients].copy_(view[:clients])
        for name, values in members.buffers.items():
            self.buffers[name][:clients].copy_(values)
        for name, value in shared.items():
            self.shared[name].copy_(value)
        self.losses.zero_()

    def unload(self, rows: Row) -> None:
        """Write what `load` took back, after the sessions."""
        clients = len(rows.floats)
        rows.copy_(self.rows.first(clients))
        for name, values in self.members.buffers.items():
            values.copy_(self.buffers[name][:clients])

    def gradients(self, step: int, active: int) -> Sequence[Tensor | None]:
        """(active, *shape) gradients of one batch of each active client."""
        sizes = self.members.batches.sizes[:active, step]
        kinds = np.unique(sizes).tolist()
        if len(kinds) == 1 and active >= self._floor:
            found = self._losses(self.first(active), range(active), step)
            self._note(slice(0, active), found, step, *kinds)
            return found.gradients
        whole: list[Tensor | None] = []
        for size in kinds:
            places = np.flatnonzero(sizes == size).tolist()
            index = sent(torch.tensor(places), self.losses.device)
            padded = self.padded(places)
            taken = self.take(sent(torch.tensor(padded), self.losses.device))
            found = self._losses(taken, padded, step, real=len(places))
            self.keep(taken, index)
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
        with self.members.timings.part("data"):
            batch = self.members.batches.batch(places, step)
        draws = cache(lambda: self.members.draws.part(places, real))
        return self._forward.losses(views, batch, step, shared=self.shared, draws=draws, real=real)

    def first(self, clients: int) -> Views:
        """The views of the first clients."""
        if clients == len(self.losses):
            return self.views
        return {name: view[:clients] for name, view in self.views.items()}

    def padded(self, places: Sequence[int]) -> list[int]:
        """Places of at least as many clients as are run at once."""
        return [*places, *[places[-1]] * (self._floor - len(places))]

    def take(self, index: Tensor) -> Views:
        """Copies of some clients' values; parameters at aligned addresses, as in rows."""
        taken = {name: view.index_select(0, index) for name, view in self.views.items()}
        kept = {*self._buffers, *self.buffers}  # statistics have to be contiguous
        return {name: part if name in kept else aligned(part) for name, part in taken.items()}

    def keep(self, taken: Views, index: Tensor) -> None:
        """Copy back what the step of some clients has written, but not those that pad the pack."""
        for name in self._written:
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


def power_of_two(count: int) -> int:
    """A power of two, so that few sessions need more room than those before them."""
    return 1 << (count - 1).bit_length()


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
