"""torch.optim.SGD on K rows, in one pass over the matrix of them."""

from collections.abc import Sequence

import torch
from lightfed_kernels import sgd_step_
from torch import Tensor
from typing_extensions import override

from lightfed.local.optimizer import Params
from lightfed.local.packed.steps.steppers import PackedStepper
from lightfed.local.packed.steps.tensors import Members
from lightfed.local.steppers.sgd import SGDStepper
from lightfed.state.rows import ModelLayout

CLIPPED = "gradients are clipped after a pull"


class FusedSGD(PackedStepper):
    """Decay, momentum, pull, step and mask of K rows by one operator, after one copy of gradients.

    What differs between sessions lies in tensors that keep their addresses, so that a recorded step
    serves all of them.

    Args:
        stepper: of the group's sessions, plain SGD without dampening; all parameters get gradients.
        layout: of the rows.
        pull: of all clients to the models that they start from, instead of their hooks.
    """

    masks = True

    def __init__(self, stepper: SGDStepper, layout: ModelLayout, *, pull: float = 0.0) -> None:
        self._received = pull
        self._lr = stepper.lr
        self._momentum, self._nesterov = stepper.momentum, stepper.nesterov
        self._decay = stepper.weight_decay
        self._clipping = stepper.clipping
        self._span = layout.floats.span(layout.parameters)
        entries = layout.floats.entries[: layout.parameters]
        ends = [entry.offset for entry in entries[1:]] + [layout.size]
        # Columns of padding, and of buffers, after every parameter.
        self._gaps = [
            end - entry.offset - entry.numel for entry, end in zip(entries, ends, strict=True)
        ]
        self._gradient = self._buffer = self._anchors = torch.empty(0, 0)
        self._words = torch.empty(0, 0, dtype=torch.int32)
        self._rate = torch.empty(0)
        self._zeros: dict[int, Tensor] = {}  # by the number of columns
        self._rows = torch.empty(0, 0)
        self._members: Members | None = None
        self._pull = 0.0
        self._masked = False

    def unfit(self, members: Members) -> str:
        """Why sessions are not stepped by this; empty if they are."""
        pulls = {None if p is None else p.gamma for p in members.proximals}
        if members.phases:
            return "a session has phases"
        if len(pulls) > 1:
            return "clients are pulled differently"
        if pulls != {None} and self._clipping is not None:
            return CLIPPED
        if pulls != {None} and self._received:
            return "clients are pulled to two models"
        return ""

    @property
    def key(self) -> tuple[float, bool]:
        """The numbers of a session that a recorded step keeps."""
        return self._pull, self._masked

    @override
    def reset(
        self, rows: Tensor, values: Params, members: Members, *, span: int, lr: float | None
    ) -> None:
        self._rows, self._members = rows, members
        if len(self._gradient) < len(rows):
            self._allocate(rows)
        self._rate.fill_(self._lr if lr is None else lr)
        if self._momentum:
            self._buffer.zero_()
        self._start_pulls(members)
        given = [mask for mask in members.masks if mask is not None]
        self._masked = bool(given)
        if given:
            self._words = _kept(self._words, self._gradient, rows.shape[1] // 32, torch.int32)
            for words, mask in zip(self._words, members.masks, strict=False):
                _ = words.fill_(-1) if mask is None else words.copy_(mask)

    def _allocate(self, rows: Tensor) -> None:
        self._gradient = torch.zeros_like(rows)
        self._buffer = torch.zeros_like(rows) if self._momentum else rows.new_empty(0, 0)
        self._rate = rows.new_empty((), dtype=torch.float64)
        self._zeros = {gap: rows.new_zeros(len(rows), gap) for gap in {*self._gaps} - {0}}

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
            if self._momentum and pull.momentum is not None:
                self._buffer[place, : self._span].copy_(pull.momentum)

    @override
    def step(self, grads: Sequence[Tensor | None], clients: int) -> None:
        gradient = self._gathered(grads, clients)
        if self._clipping is not None:
            self._clip(gradient)
        sgd_step_(
            self._rows[:clients].view(-1),
            gradient.view(-1),
            lr=self._rate,
            momentum=self._momentum,
            buffer=self._buffer[:clients].view(-1) if self._momentum else None,
            weight_decay=self._decay,
            nesterov=self._nesterov,
            prox=self._pull,
            anchor=self._anchors[:clients].view(-1) if self._pull else None,
            words=self._words[:clients].view(-1) if self._masked else None,
        )

    def _gathered(self, grads: Sequence[Tensor | None], clients: int) -> Tensor:
        """(clients, P) all gradients, 0 in padding and buffers."""
        parts = []
        for grad, gap in zip(grads, self._gaps, strict=True):
            if grad is None:
                raise NotImplementedError("a loss that uses other parameters in other batches")
            parts.append(grad.reshape(clients, -1))
            if gap:
                parts.append(self._zeros[gap][:clients])
        return torch.cat(parts, 1, out=self._gradient[:clients])

    def _clip(self, gradient: Tensor) -> None:
        """Clip each client's row; its norm is one that no other row has a part in."""
        assert self._clipping is not None
        limit = self._clipping.limit
        if self._clipping.algorithm == "value":
            gradient.clamp_(-limit, limit)
            return
        norms = torch.stack(torch._foreach_norm(list(gradient.unbind())))
        gradient.mul_((limit / (norms + 1e-6)).clamp_(max=1.0).unsqueeze(1))

    @override
    def finish(self) -> None:
        members, self._members = self._members, None
        self._rows = torch.empty(0, 0)
        if members is None or not self._momentum:
            return
        for row, proximal in zip(self._buffer, members.proximals, strict=False):
            if proximal is not None and proximal.carries:
                proximal.momentum = row[: self._span].clone()


def _kept(kept: Tensor, like: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros with a row for each of `like`; what is there already stays where it is."""
    if len(kept) == len(like) and kept.device == like.device:
        return kept
    return like.new_zeros(len(like), columns, dtype=dtype)
