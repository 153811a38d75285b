"""Steps on K rows in one pass over the matrix of them."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.local.optimizer import Clipping, Params
from lightfed.local.packed.steps.steppers import PackedStepper
from lightfed.local.packed.steps.tensors import Members
from lightfed.state.rows import ModelLayout

CLIPPED = "gradients are clipped after a pull"


class FusedStepper(PackedStepper):
    """Decay, moments, pull, step and mask of K rows by one operator, after one copy of gradients.

    What differs between sessions lies in tensors that keep their addresses, so that a recorded step
    serves all of them. All parameters get gradients.

    Args:
        layout: of the rows.
        parameters: of the module, in the order of the layout.
        clipping: of each client's gradients.
        pull: of all clients to the models that they start from, instead of their hooks.

    Attributes:
        moments: matrices of the rows' shape that the optimiser keeps, of any session.
    """

    masks = True
    moments: int

    def __init__(
        self,
        layout: ModelLayout,
        parameters: Sequence[Tensor],
        clipping: Clipping | None,
        pull: float = 0.0,
    ) -> None:
        self._received, self._parameters = pull, parameters
        self._clipping = clipping
        self._span = layout.floats.span(layout.parameters)
        entries = layout.floats.entries[: layout.parameters]
        ends = [entry.offset for entry in entries[1:]] + [layout.size]
        # Columns of padding, and of buffers, after every parameter.
        self._gaps = [
            end - entry.offset - entry.numel for entry, end in zip(entries, ends, strict=True)
        ]
        self._spans = [(e.offset, end) for e, end in zip(entries, ends, strict=True)]
        self._frozen: list[int] = []  # positions of parameters
        self._still: list[tuple[int, int]] = []  # columns that they are in
        self._gradient = self._anchors = torch.empty(0, 0)
        self._moments: list[Tensor] = []
        self._rate: Tensor | None = None
        self._words = torch.empty(0, 0, dtype=torch.int32)
        self._zeros: dict[int, Tensor] = {}  # by the number of columns
        self._rows = torch.empty(0, 0)
        self._members: Members | None = None
        self._pull = 0.0
        self._masked = False

    def unfit(self, members: Members) -> str:
        """Why sessions are not stepped by this; empty if they are."""
        pulls = {None if p is None else p.gamma for p in members.proximals}
        if members.phases and any(mask is not None for mask in members.masks):
            return "a session has phases and masks"
        if len(pulls) > 1:
            return "clients are pulled differently"
        if pulls != {None} and self._clipping is not None:
            return CLIPPED
        if pulls != {None} and self._received:
            return "clients are pulled to two models"
        return ""

    @property
    def matrices(self) -> int:
        """Copies of the rows that it keeps, besides the momentum that other steps have too."""
        gradient, anchors = 1, int(self._received != 0)
        return gradient + self.moments + anchors - 1

    @property
    def key(self) -> tuple[float, bool, tuple[int, ...]]:
        """What a recorded step keeps of a session."""
        return self._pull, self._masked, tuple(self._frozen)

    @override
    def reset(
        self, rows: Tensor, values: Params, members: Members, *, span: int, lr: float | None
    ) -> None:
        self._rows, self._members, self._frozen, self._still = rows, members, [], []
        if len(self._gradient) < len(rows):
            self._gradient = torch.zeros_like(rows)
            self._moments = [torch.zeros_like(rows) for _ in range(self.moments)]
            self._zeros = {gap: rows.new_zeros(len(rows), gap) for gap in {*self._gaps} - {0}}
        for moment in self._moments:
            moment.zero_()
        self._start(members.batches.sizes.shape[1], lr)
        self._start_pulls(members)
        given = [mask for mask in members.masks if mask is not None]
        self._masked = bool(given)
        if given:
            self._words = _kept(self._words, self._gradient, rows.shape[1] // 32, torch.int32)
            for words, mask in zip(self._words, members.masks, strict=False):
                _ = words.fill_(-1) if mask is None else words.copy_(mask)

    @abstractmethod
    def _start(self, steps: int, lr: float | None) -> None:
        """Write the numbers of a session's steps to the device."""

    def _rate_of(self, lr: float) -> Tensor:
        """A learning rate on the device, in its place."""
        if self._rate is None:
            self._rate = self._rows.new_empty((), dtype=torch.float64)
        return self._rate.fill_(lr)

    def _start_pulls(self, members: Members) -> None:
        pulls = [proximal for proximal in members.proximals if proximal is not None]
        self._pull = pulls[0].gamma if pulls else self._received
        if self._pull:
            self._anchors = _kept(self._anchors, self._gradient, self._rows.shape[1], torch.float32)
        if self._received:
            self._anchors[: len(self._rows)].copy_(self._rows)
        for place, pull in enumerate(pulls):
            if self._pull:
                self._anchors[place, : self._span].copy_(pull.anchor)
            if self._moments and pull.momentum is not None:
                self._carry_on(place, pull.momentum)

    def _carry_on(self, place: int, momentum: Tensor) -> None:
        """Begin a client's session with the momentum of its last one."""
        self._moments[0][place, : self._span].copy_(momentum)

    @override
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        chosen = {id(parameter) for parameter in parameters}
        self._frozen = [i for i, p in enumerate(self._parameters) if id(p) not in chosen]
        self._still = []
        for start, end in (self._spans[i] for i in self._frozen):
            joined = bool(self._still) and self._still[-1][1] == start
            first = self._still.pop()[0] if joined else start
            self._still.append((first, end))

    @override
    def step(self, grads: Sequence[Tensor | None], clients: int) -> None:
        gradient = self._gathered(grads, clients)
        scale = None if self._clipping is None else self._clip(gradient)
        state = (self._rows, *self._moments)
        kept = [matrix[:clients, a:b] for matrix in state for a, b in self._still]
        before = [part.clone() for part in kept]
        flat = [part[:clients].view(-1) for part in (self._rows, self._gradient, *self._moments)]
        self._update(
            *flat,
            scale=scale,
            anchor=self._anchors[:clients].view(-1) if self._pull else None,
            words=self._words[:clients].view(-1) if self._masked else None,
        )
        if kept:
            torch._foreach_copy_(kept, before)

    @abstractmethod
    def _update(self, row: Tensor, gradient: Tensor, *moments: Tensor, **given: Any) -> None:
        """Update rows that lie end to end; `given` are the scales, anchor and masks."""

    def _gathered(self, grads: Sequence[Tensor | None], clients: int) -> Tensor:
        """(clients, P) all gradients, 0 in padding and buffers."""
        parts = []
        frozen = set(self._frozen)
        for i, (grad, gap) in enumerate(zip(grads, self._gaps, strict=True)):
            if i in frozen:
                start, end = self._spans[i]
                grad = self._rows.new_zeros(1, 1).expand(clients, end - start - gap)
            if grad is None:
                raise NotImplementedError("a loss that uses other parameters in other batches")
            parts.append(grad.reshape(clients, -1))
            if gap:
                parts.append(self._zeros[gap][:clients])
        return torch.cat(parts, 1, out=self._gradient[:clients])

    def _clip(self, gradient: Tensor) -> Tensor | None:
        """Clip values; of norms (clients,) scales. No other row has a part in a client's."""
        assert self._clipping is not None
        limit = self._clipping.limit
        if self._clipping.algorithm == "value":
            gradient.clamp_(-limit, limit)
            return None
        norms = torch.stack(torch._foreach_norm(list(gradient.unbind())))
        return (limit / (norms + 1e-6)).clamp_(max=1.0)

    @override
    def finish(self) -> None:
        members, self._members = self._members, None
        self._rows = torch.empty(0, 0)
        if members is None or not self._moments:
            return
        for row, proximal in zip(self._moments[0], members.proximals, strict=False):
            if proximal is not None and proximal.carries:
                proximal.momentum = row[: self._span].clone()


def _kept(kept: Tensor, like: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros with a row for each of `like`; what is there already stays where it is."""
    if len(kept) == len(like) and kept.device == like.device:
        return kept
    return like.new_zeros(len(like), columns, dtype=dtype)
