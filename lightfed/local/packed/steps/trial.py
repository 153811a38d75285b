"""A training step of a few clients at once, compared with the step of one client at a time.

What a user's step does in Python, or `vmap` does in its place, shows only when it runs. So a group
whose clients would train differently in a pack is found before the first round.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn.modules.dropout import _DropoutNd

from lightfed.local.client_group import GroupState
from lightfed.local.packed.forward import OWN, Losses, PackedForward, Views
from lightfed.local.session import Autocast
from lightfed.models.build import DataSpec, blank
from lightfed.state.rows import Row
from lightfed.utils.errors import UserError, reason
from lightfed.utils.rng import python_states, seeded, streams, torch_generator

_CLIENTS, _SAMPLES = 5, 5
_FEWER = [1, 4, 2]  # clients of another pack, most of them in other places
# Errors of losses and gradients, relative to their size; more in half precision, and on a device.
_EXACT, _ROUNDED = 1e-2, 0.2


def tried(
    state: GroupState, data: DataSpec, context: Autocast | None, *, starts: bool
) -> Losses | str:
    """A training step of a few clients at once, or why such steps are not those of one alone.

    `starts` says that clients may be given buffers of their own.
    """
    module, device = state.module, state.store.device
    mode, others = module.training, _outside(state)
    try:
        module.train()
        kept = _kept(module)
        trial = _Trial(state, data, context, others if starts else {})
        found = trial.together(range(_CLIENTS))
        if _kept(module) != kept:
            return "its step keeps numbers or tensors in attributes that are no buffers"
        if trial.draws() and trial.draws():  # twice: another thread may draw meanwhile
            return "its step draws from a generator of all clients"
        return trial.differs(found) or found
    except UserError:
        raise
    except Exception as error:  # whatever a user's step does that vmap cannot follow
        return reason(error)[:200]
    finally:
        state.live.bind(state.initial.to(device))
        state.live.unbind()
        for name, buffer in others.items():
            module.get_buffer(name).copy_(buffer)
        module.train(mode)


class _Trial:
    """Clients with different models, and a batch of each; `own` buffers may be a client's own."""

    def __init__(
        self, state: GroupState, data: DataSpec, context: Autocast | None, own: Views
    ) -> None:
        module, device = state.module, state.store.device
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        self._state, self._context = state, context
        self._forward = PackedForward(module, state.layout, trained, context=context)
        self._small = {n: b for n, b in own.items() if b.numel() <= OWN}
        factors = 1 + torch.arange(_CLIENTS)[:, None] / 16
        floats = state.initial.floats.repeat(_CLIENTS, 1)
        floats[:, : state.layout.floats.span(state.layout.parameters)] *= factors
        self._rows = Row(floats, state.initial.integers.repeat(_CLIENTS, 1)).to(device)
        self._batch = [part.to(device) for part in _batches(data)]
        self._exact = device.type == "cpu" and context is None

    def together(self, places: Sequence[int]) -> Losses:
        """The losses and gradients of some clients at once."""
        index, device = list(places), self._rows.floats.device
        rows = Row(self._rows.floats[index], self._rows.integers[index])
        views = self._forward.views(rows.floats, rows.integers)
        views |= {name: torch.stack([b] * len(index)) for name, b in self._small.items()}
        outside, draws = _outside(self._state), streams(index, device)
        return self._forward.losses(
            {name: value.clone() for name, value in views.items()},
            [part[index] for part in self._batch],
            0,
            shared={name: b for name, b in outside.items() if name not in self._small},
            draws=lambda: draws,
        )

    def differs(self, found: Losses) -> str:
        """How losses and gradients depend on the pack; empty if they do not."""
        device = self._rows.floats.device
        if device.type == "cpu":
            fewer = self.together(_FEWER)
            theirs = [part[_FEWER] for part in (found.values, *found.gradients) if part is not None]
            mine = [part for part in (fewer.values, *fewer.gradients) if part is not None]
            if not all(map(torch.equal, mine, theirs)):
                return "a client's bits depend on the others of its pack"
        elif any(isinstance(part, _DropoutNd) for part in self._state.module.modules()):
            return ""  # it has other draws
        limit = _EXACT if self._exact else _ROUNDED
        for place in (0, _CLIENTS - 1):
            its = [found.values[place], *(g if g is None else g[place] for g in found.gradients)]
            if not _close(its, self._alone(place), limit):
                return "its losses or gradients are not those of a client alone"
        return ""

    def draws(self) -> bool:
        """Whether a client's step draws from a generator of Python's or numpy's."""
        with seeded(0, self._rows.floats.device):
            before = python_states()
            self._step(0)
            return python_states() != before

    def _alone(self, place: int) -> list[Tensor | None]:
        """The loss and gradients of a client, as in a session of its own."""
        with seeded(place, self._rows.floats.device):
            return self._step(place)

    def _step(self, place: int) -> list[Tensor | None]:
        state = self._state
        state.live.bind(Row(self._rows.floats[place].clone(), self._rows.integers[place].clone()))
        loss = self._forward.one([part[place].clone() for part in self._batch], 0)
        grads = torch.autograd.grad(loss.reshape(()), state.live.trainable, allow_unused=True)
        state.live.unbind()
        return [loss.detach(), *grads]


def _batches(data: DataSpec) -> tuple[Tensor, Tensor]:
    """Inputs and labels of every client; the whole part of an input is 0 or 1, a known word."""
    generator = torch_generator(0, "trial")
    x = blank(data, samples=_CLIENTS * _SAMPLES).unflatten(0, (_CLIENTS, _SAMPLES))
    if data.task == "masked_lm":
        x.random_(0, data.num_classes, generator=generator)
        return x, x
    x.uniform_(0, 2, generator=generator)
    return x, torch.arange(_CLIENTS * _SAMPLES).view(_CLIENTS, _SAMPLES) % max(1, data.num_classes)


def _close(found: Sequence[Tensor | None], alone: Sequence[Tensor | None], limit: float) -> bool:
    """Whether a loss and gradients are the same, up to rounding; NaN and inf prove nothing."""
    if [x is None for x in found] != [x is None for x in alone]:
        return False
    (ours, *mine), (loss, *theirs) = (
        [x.double().flatten() for x in given if x is not None] for given in (found, alone)
    )
    if not mine or not all(x.isfinite().all() for x in (loss, *theirs)):
        return True
    error = torch.cat(mine).sub(torch.cat(theirs)).norm()
    fits = error <= limit * (1e-3 + torch.cat(theirs).norm())
    return bool(fits and (ours - loss).abs() <= limit * (1 + loss.abs()))


def _outside(state: GroupState) -> Views:
    """Copies of the buffers that lie in no row."""
    in_row = {entry.name for entry in [*state.layout.floats, *state.layout.integers]}
    return {n: b.clone() for n, b in state.module.named_buffers() if n not in in_row}


def _kept(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """What a module keeps in Python: numbers, lengths of lists, tensors of several clients."""
    found: dict[tuple[str, str], Any] = {}
    for path, part in module.named_modules():
        for name, value in (vars(part) | part._buffers).items():
            if isinstance(value, str | float | int):
                found[path, name] = value
            elif isinstance(value, list | dict | set):
                found[path, name] = len(value)
            elif isinstance(value, Tensor) and is_batchedtensor(value):
                found[path, name] = Tensor
    return found
