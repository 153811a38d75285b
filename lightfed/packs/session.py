"""The local training of K clients of one group at once: a pack.

Which clients form a pack follows from the configuration and the round alone. So all operators see
the same shapes on any number of ranks, and give the same bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lightning.pytorch as L
import torch
from lightfed_kernels import apply_mask_, unpack_mask
from torch import Tensor

from lightfed.data.batches import PackBatches, sent
from lightfed.local.logbook import on_this_rank, reset_metrics
from lightfed.local.optimizer import Clipping, GradientHook, Proximal
from lightfed.local.session import Autocast, Work
from lightfed.packs import stacked
from lightfed.packs.forward import PackForward
from lightfed.packs.report import BatchSizes, PackResult
from lightfed.packs.stacked import Views
from lightfed.packs.stacked_optimizer import StackedOptimizer, clipped
from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.rng import seed_default_generators
from lightfed.utils.stopwatch import Stopwatch, Timings


@dataclass(frozen=True)
class PackWork:
    """The work of K sessions, those with the most batches first.

    Attributes:
        clients: Numbers of the clients.
        batches: The batches of all sessions.
        works: The hooks, mask and pull of each session; empty if nothing looks at single sessions.
        seed: Names the pack's draws, such as dropout.
        lr: Learning rate of the round; None keeps the optimizer's own.
        own_buffers: The clients' values of buffers that lie in no row, of shape (K, *shape), by
            name.
        shared_buffers: Such buffers that are the same for all clients, by name.
        phases: The parameters that are trained from a batch on, by the number of that batch.
        timings: Of this rank.
        epoch_batches: Number of batches in a local epoch; see `PackForward`.
    """

    clients: Sequence[int]
    batches: PackBatches
    works: Sequence[Work]
    seed: int
    lr: float | None
    own_buffers: Views
    shared_buffers: Views
    phases: Mapping[int, Sequence[Tensor]]
    timings: Timings
    epoch_batches: int


class PackSession:
    """Trains K clients in the one module of their group, which keeps its own values.

    Clients are sorted by the number of their batches, longest first. So the clients that still
    train are the first ones at every step: the tensors of a step are leading slices.

    Args:
        module: The module of the group.
        layout: The layout of its rows.
        optimizer: Steps the parameters of K clients.
        clipping: Clips the gradients of each client; None for no clipping.
        context: Autocast of the Trainer's precision; None in full precision.
        known: Whether all layers are known by their types.

    Attributes:
        optimizer: As given.
        rates: Learning rates that the sessions log, by name. They do not change in a session.
        trained: Names of the trained parameters, in the order of the layout.
        parameter_size: Number of elements of a row that are parameters.
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
        self._module = module
        self._layout = layout
        self._clipping = clipping
        self._forward = PackForward(module, layout, context, known=known)
        self._entries = {entry.name: entry for entry in layout.floats}
        self.optimizer = optimizer
        self.rates: Mapping[str, float] = {}
        self.trained = self._forward.trained
        self.parameter_size = layout.parameter_size

    @on_this_rank
    def train(self, rows: Row, work: PackWork) -> PackResult:
        """Train K clients on their rows, (K, P) and (K, Q), in place.

        Args:
            rows: The clients' models, in the order of `work.clients`.
            work: What the sessions do.

        Returns:
            What the sessions report. Its numbers may still be on the device.
        """
        device = rows.floats.device
        stopwatch = Stopwatch(device)
        self._module.train()
        reset_metrics(self._module)
        seed_default_generators(work.seed, device)

        # The optimizer trains these tensors in place. They go back into the rows at the end.
        tensors = stacked.gather(self._layout, rows, self._module) | work.own_buffers
        optimizer = self.optimizer
        pulls = _Pulls(self, rows, work)
        optimizer.start([tensors[name] for name in self.trained], lr=work.lr, momenta=pulls.momenta)
        uncovered = self._uncovered(work, rows)
        hooks = _GradientHooks(self, rows, work)

        sizes = work.batches.sizes
        sizes_on_device = BatchSizes(sizes, device)
        result = PackResult(work.clients, sizes, stopwatch, sizes_on_device, self.rates)

        # What the forward pass reads: parameters from the optimizer, and buffers.
        values = dict(tensors)
        values |= dict(zip(self.trained, optimizer.leaves, strict=True))
        others = tensors.keys() - set(self.trained)

        self._forward.epoch_batches = work.epoch_batches
        batches = iter(work.batches)
        selected: Sequence[int] = range(len(self.trained))
        active_clients: list[int] = (sizes > 0).sum(0).tolist()
        for step, active in enumerate(active_clients):
            if step in work.phases:
                selected = self._positions_of(work.phases[step])

            if active < len(optimizer.leaves[0]):
                optimizer.narrow(active)
                for name in others:
                    values[name] = tensors[name][:active]

            with work.timings.part("data"):
                batch = next(batches)

            buffers = {name: values[name] for name in self._forward.buffers if name in values}
            losses, logged, gradients = self._forward(
                values,
                work.shared_buffers,
                [optimizer.leaves[i] for i in selected],
                batch,
                step,
                sizes_on_device.unequal_at(step, active),
            )

            # Some modules put a new tensor in the place of a buffer. Its values have to get into
            # the tensor that goes back into the rows.
            for name, buffer in buffers.items():
                if values[name] is not buffer:
                    values[name] = buffer.copy_(values[name])

            with torch.no_grad():
                self._update(selected, gradients, hooks, pulls, tensors)
                for leaf, mask in zip(optimizer.leaves, uncovered, strict=False):
                    leaf.masked_fill_(mask[:active], 0)

            result.note(losses, logged, step)

        optimizer.finish()
        pulls.keep_momenta()
        stacked.scatter(self._layout, tensors, rows)

        # Once more on the rows: ASPG has put its iterates there, which no step has masked.
        for row, session_work in zip(rows.floats, work.works, strict=False):
            if session_work.mask is not None:
                apply_mask_(row, session_work.mask)

        stopwatch.stop()
        result.norms = torch.linalg.vector_norm(rows.floats, dim=1)
        return result

    def _update(
        self,
        selected: Sequence[int],
        gradients: Sequence[Tensor | None],
        hooks: "_GradientHooks",
        pulls: "_Pulls",
        tensors: Views,
    ) -> None:
        """Take an optimizer step from the gradients of the selected parameters.

        The order is that of a client alone: the algorithm's hook, the pull, clipping, the decay.
        """
        used = []
        changed = []
        for position, gradient in zip(selected, gradients, strict=True):
            if gradient is not None:
                used.append(position)
                changed.append(gradient)

        leaves = self.optimizer.leaves
        changed = hooks.apply(changed, used, tensors)
        changed = pulls.add_pull(changed, used, leaves)
        if self._clipping is not None:
            changed = clipped(self._clipping, changed, used)
        changed = pulls.add_decay(changed, used, leaves)

        all_gradients: list[Tensor | None] = [None] * len(leaves)
        for position, gradient in zip(used, changed, strict=True):
            all_gradients[position] = gradient
        self.optimizer.step(all_gradients)

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Return the trained parameters in a (K, P) matrix, as views of shape (K, *shape)."""
        views = []
        for name in self.trained:
            entry = self._entries[name]
            columns = matrix[:, entry.offset : entry.offset + entry.numel]
            views.append(columns.view(len(matrix), *entry.shape))
        return views

    def _positions_of(self, parameters: Sequence[Tensor]) -> list[int]:
        """Return the positions of some of the module's parameters among the trained ones."""
        wanted = {id(parameter) for parameter in parameters}
        by_name = dict(self._module.named_parameters())
        return [i for i, name in enumerate(self.trained) if id(by_name[name]) in wanted]

    def _uncovered(self, work: PackWork, rows: Row) -> list[Tensor]:
        """Return what the clients' masks leave out, of shape (K, *shape) for each parameter.

        The list is empty if no client has a mask.
        """
        if all(session_work.mask is None for session_work in work.works):
            return []

        uncovered = torch.zeros_like(rows.floats, dtype=torch.bool)
        for row, session_work in zip(uncovered, work.works, strict=True):
            if session_work.mask is not None:
                row.copy_(unpack_mask(session_work.mask)).logical_not_()
        return [part.contiguous() for part in self.parts(uncovered)]


class _GradientHooks:
    """The algorithm's changes to gradients, each in a row of its client's own, of shape (P,).

    Args:
        session: Whose gradients are changed.
        rows: The clients' models. Before a hook is called, their parameters are those at which the
            gradient was taken.
        work: Has the hooks, of all clients or of none.
    """

    def __init__(self, session: PackSession, rows: Row, work: PackWork) -> None:
        self._hooks: list[GradientHook] = []
        for session_work in work.works:
            if session_work.hook is not None:
                self._hooks.append(session_work.hook)

        if self._hooks:
            self._gradients = torch.zeros_like(rows.floats[:, : session.parameter_size])  # (K, P)
            self._gradient_parts = session.parts(self._gradients)
            self._row_parts = session.parts(rows.floats)
            self._names = session.trained

    def apply(self, gradients: list[Tensor], used: Sequence[int], tensors: Views) -> list[Tensor]:
        """Return the gradients after the hooks.

        Args:
            gradients: (active, *shape) each, of the parameters `used`.
            used: Positions of these parameters.
            tensors: The models that are trained, (K, *shape) by name.
        """
        if not self._hooks:
            return gradients

        # Hooks read the model at which the gradient was taken.
        for row_part, name in zip(self._row_parts, self._names, strict=True):
            row_part.copy_(tensors[name])

        # Parameters without a gradient have a gradient of 0 in the row, not the last one.
        if len(used) < len(self._gradient_parts):
            self._gradients.zero_()

        active = len(gradients[0])
        parts = [self._gradient_parts[i][:active] for i in used]
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient)

        for hook, row in zip(self._hooks[:active], self._gradients, strict=False):
            hook(row)

        # Copies: later steps of this update must not write into the row.
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]


class _Pulls:
    """The clients' pulls towards other models, their decays, and the momenta that they carry.

    Attributes:
        momenta: (K, *shape) for each trained parameter, with which the optimizer starts; None if
            no client brings any.
    """

    def __init__(self, session: PackSession, rows: Row, work: PackWork) -> None:
        self._session = session
        self._parameters = rows.floats[:, : session.parameter_size]  # (K, P)
        self._pulls: list[Proximal] = []
        self._anchors: list[Tensor] = []
        self._decays: list[Tensor] = []
        self.momenta: list[Tensor] | None = None
        if all(session_work.proximal is None for session_work in work.works):
            return

        for session_work, row in zip(work.works, self._parameters, strict=True):
            self._pulls.append(session_work.proximal or Proximal(row, 0.0))

        if any(pull.gamma for pull in self._pulls):
            anchors = torch.stack([pull.anchor for pull in self._pulls])
            self._anchors = [part.contiguous() for part in session.parts(anchors)]
            gammas = torch.tensor([pull.gamma for pull in self._pulls])
            self._gammas = sent(gammas, anchors.device)

        decays = [pull.decay for pull in self._pulls]
        if any(decay is not None for decay in decays):
            self._decays = self._stacked(decays)

        momenta = [pull.momentum for pull in self._pulls]
        if any(momentum is not None for momentum in momenta):
            self.momenta = self._stacked(momenta)

    def _stacked(self, vectors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return K vectors of shape (P,) as (K, *shape) for each parameter; 0 for None."""
        matrix = torch.zeros_like(self._parameters)
        for row, vector in zip(matrix, vectors, strict=True):
            if vector is not None:
                row.copy_(vector)
        return [part.contiguous() for part in self._session.parts(matrix)]

    def add_pull(
        self, gradients: list[Tensor], used: Sequence[int], leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the gradients plus gamma (w - anchor).

        Args:
            gradients: (active, *shape) each, of the parameters `used`.
            used: Positions of these parameters.
            leaves: All trained parameters.
        """
        if not self._anchors:
            return gradients

        active = len(gradients[0])
        values = [leaves[i] for i in used]
        anchors = [self._anchors[i][:active] for i in used]
        pulls = torch._foreach_sub(values, anchors)

        # (active, 1, ..., 1), so that each client has its own gamma.
        gammas = [self._gammas[:active].view(-1, *[1] * (pull.dim() - 1)) for pull in pulls]
        torch._foreach_mul_(pulls, gammas)
        return list(torch._foreach_add(gradients, list(pulls)))

    def add_decay(
        self, gradients: list[Tensor], used: Sequence[int], leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the gradients plus the decay of the parameters; arguments as for `add_pull`."""
        if not self._decays:
            return gradients

        active = len(gradients[0])
        values = [leaves[i] for i in used]
        decays = [self._decays[i][:active] for i in used]
        return list(torch._foreach_addcmul(gradients, values, decays))

    def keep_momenta(self) -> None:
        """Store the optimizer's momenta where the clients' next sessions find them."""
        if not any(pull.carries for pull in self._pulls):
            return

        carried = self._session.optimizer.carried()
        if all(momentum is None for momentum in carried):
            return

        momenta = torch.zeros_like(self._parameters)
        for part, momentum in zip(self._session.parts(momenta), carried, strict=True):
            # A parameter that got its first gradient late has momenta of fewer clients.
            if momentum is not None:
                part[: len(momentum)].copy_(momentum)

        for pull, row in zip(self._pulls, momenta, strict=True):
            if pull.carries:
                pull.momentum = row.clone()
