"""torch.optim's SGD, Adam and AdamW on K rows, in one pass over the matrix of them."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from lightfed_kernels import adam_numbers, adam_step_, sgd_step_
from torch import Tensor, optim
from typing_extensions import override

from lightfed.local.optimizer import Clipping, Params, Stepper
from lightfed.local.packed.steps.steppers import PackedStepper
from lightfed.local.packed.steps.tensors import Members, power_of_two
from lightfed.local.steppers.sgd import SGDStepper
from lightfed.local.steppers.torch_optimizer import OptimizerStepper
from lightfed.state.rows import ModelLayout
from lightfed.utils.memory import sent

CLIPPED = "gradients are clipped after a pull"
_RECEIVED = "a pull to the model received"
_VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")


class FusedStepper(PackedStepper):
    """Decay, moments, pull, step and mask of K rows by one operator, after one copy of gradients.

    What differs between sessions lies in tensors that keep their addresses, so that a recorded step
    serves all of them. All parameters get gradients.

    Args:
        layout: of the rows.
        clipping: of each client's gradients.
        pull: of all clients to the models that they start from, instead of their hooks.

    Attributes:
        moments: matrices of the rows' shape that the optimiser keeps, of any session.
    """

    masks = True
    moments: int

    def __init__(self, layout: ModelLayout, clipping: Clipping | None, pull: float) -> None:
        self._received = pull
        self._clipping = clipping
        self._span = layout.floats.span(layout.parameters)
        entries = layout.floats.entries[: layout.parameters]
        ends = [entry.offset for entry in entries[1:]] + [layout.size]
        # Columns of padding, and of buffers, after every parameter.
        self._gaps = [
            end - entry.offset - entry.numel for entry, end in zip(entries, ends, strict=True)
        ]
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
    def matrices(self) -> int:
        """Copies of the rows that it keeps, besides the momentum that other steps have too."""
        gradient, anchors = 1, int(self._received != 0)
        return gradient + self.moments + anchors - 1

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
    def step(self, grads: Sequence[Tensor | None], clients: int) -> None:
        gradient = self._gathered(grads, clients)
        if self._clipping is not None:
            self._clip(gradient)
        flat = [part[:clients].view(-1) for part in (self._rows, self._gradient, *self._moments)]
        self._update(
            *flat,
            anchor=self._anchors[:clients].view(-1) if self._pull else None,
            words=self._words[:clients].view(-1) if self._masked else None,
        )

    @abstractmethod
    def _update(self, row: Tensor, gradient: Tensor, *moments: Tensor, **given: Any) -> None:
        """Update rows that lie end to end; `given` are the anchor and the words of the masks."""

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
        if members is None or not self._moments:
            return
        for row, proximal in zip(self._moments[0], members.proximals, strict=False):
            if proximal is not None and proximal.carries:
                proximal.momentum = row[: self._span].clone()


class FusedSGD(FusedStepper):
    """torch.optim.SGD.

    Args:
        stepper: of the group's sessions, plain SGD without dampening.
        layout: of the rows.
        pull: of all clients to the models that they start from, instead of their hooks.
    """

    def __init__(self, stepper: SGDStepper, layout: ModelLayout, *, pull: float = 0.0) -> None:
        super().__init__(layout, stepper.clipping, pull)
        self._lr = stepper.lr
        self._options: dict[str, Any] = {
            "momentum": stepper.momentum,
            "nesterov": stepper.nesterov,
            "weight_decay": stepper.weight_decay,
        }
        self.moments = int(stepper.momentum != 0)

    @override
    def _start(self, steps: int, lr: float | None) -> None:
        self._rate_of(self._lr if lr is None else lr)

    @override
    def _update(self, row: Tensor, gradient: Tensor, *moments: Tensor, **given: Any) -> None:
        assert self._rate is not None
        buffer = moments[0] if moments else None
        options = self._options | given
        sgd_step_(row, gradient, lr=self._rate, buffer=buffer, prox=self._pull, **options)


class FusedAdam(FusedStepper):
    """torch.optim.Adam or AdamW, with the bias corrections of a session's steps on the device.

    Args:
        optimizer: plain; nothing is pulled.
        layout: of the rows.
        clipping: of each client's gradients.
    """

    moments = 2

    def __init__(
        self, optimizer: optim.Adam, layout: ModelLayout, clipping: Clipping | None
    ) -> None:
        super().__init__(layout, clipping, 0.0)
        group = optimizer.param_groups[0]
        self._lr, self._betas, self._eps = group["lr"], group["betas"], group["eps"]
        own, decay = group["decoupled_weight_decay"], float(group["weight_decay"])
        self._decay, self._own_decay = (0.0, decay) if own else (decay, 0.0)
        self._table = torch.empty(0, 3)
        self._numbers = self._count = torch.empty(0)

    @override
    def _start(self, steps: int, lr: float | None) -> None:
        if len(self._table) < steps:
            self._table = self._rows.new_empty(power_of_two(steps), 3, dtype=torch.float64)
            self._numbers = self._table.new_empty(1, 3)
            self._count = self._table.new_empty(1, dtype=torch.int64)
        rate = self._lr if lr is None else lr
        table = adam_numbers(steps, lr=rate, betas=self._betas, decoupled_decay=self._own_decay)
        self._table[:steps].copy_(sent(table, self._table.device))
        self._count.zero_()

    @override
    def _update(self, row: Tensor, gradient: Tensor, *moments: Tensor, **given: Any) -> None:
        torch.index_select(self._table, 0, self._count, out=self._numbers)
        first, second = moments
        adam_step_(
            row, gradient, first, second, self._numbers.view(3), betas=self._betas, eps=self._eps,
            weight_decay=self._decay, words=given["words"],
        )  # fmt: skip
        self._count.add_(1)


def fused_stepper(stepper: Stepper, layout: ModelLayout, *, pull: float) -> FusedStepper | str:
    """What steps K rows in one pass as `stepper` does one, or why nothing does.

    Args:
        stepper: of the group's sessions.
        layout: of the rows.
        pull: of all clients to the models that they start from.
    """
    if stepper.clipping is not None and stepper.clipping.networks:
        return "parts of a model are clipped apart"
    if pull and stepper.clipping is not None:
        return CLIPPED
    own = getattr(stepper, "fused", None)
    if own is not None:
        return f"{_RECEIVED} with an optimiser of its own" if pull else own(layout)
    if type(stepper) is SGDStepper and not stepper.dampening and stepper.factors is None:
        return FusedSGD(stepper, layout, pull=pull)
    optimizer = stepper.plain_optimizer if isinstance(stepper, OptimizerStepper) else None
    if isinstance(optimizer, optim.Adam) and type(optimizer) in (optim.Adam, optim.AdamW):
        group = optimizer.param_groups[0]
        tensors = any(isinstance(number, Tensor) for number in (group["lr"], *group["betas"]))
        if group["eps"] > 0 and not tensors and not any(map(group.get, _VARIANTS)):
            return (
                f"{_RECEIVED} with Adam" if pull else FusedAdam(optimizer, layout, stepper.clipping)
            )
    return "its optimiser is not plain SGD, Adam, AdamW or ASPG"


def _kept(kept: Tensor, like: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros with a row for each of `like`; what is there already stays where it is."""
    if len(kept) == len(like) and kept.device == like.device:
        return kept
    return like.new_zeros(len(like), columns, dtype=dtype)
