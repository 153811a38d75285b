"""torch.optim's SGD, Adam and AdamW on K rows, and the choice of what steps K rows at once."""

from collections.abc import Sequence
from typing import Any

import torch
from lightfed_kernels import adam_numbers, adam_step_, sgd_step_
from torch import Tensor, optim
from typing_extensions import override

from lightfed.local.optimizer import Clipping, Stepper
from lightfed.local.packed.steps.fused import CLIPPED, FusedStepper
from lightfed.local.packed.steps.tensors import Members, power_of_two
from lightfed.local.steppers.sgd import SGDStepper
from lightfed.local.steppers.torch_optimizer import OptimizerStepper
from lightfed.state.rows import ModelLayout
from lightfed.utils.memory import sent

_RECEIVED = "a pull to the model received"
_VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")


class FusedSGD(FusedStepper):
    """torch.optim.SGD.

    Args:
        stepper: of the group's sessions, plain SGD without dampening.
        layout: of the rows.
        parameters: of the module.
        pull: of all clients to the models that they start from, instead of their hooks.
    """

    def __init__(
        self, stepper: SGDStepper, layout: ModelLayout, parameters: Sequence[Tensor], *, pull: float
    ) -> None:
        super().__init__(layout, parameters, stepper.clipping, pull)
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
        group = optimizer.param_groups[0]
        super().__init__(layout, group["params"], clipping)
        self._lr, self._betas, self._eps = group["lr"], group["betas"], group["eps"]
        own, decay = group["decoupled_weight_decay"], float(group["weight_decay"])
        self._decay, self._own_decay = (0.0, decay) if own else (decay, 0.0)
        self._table = torch.empty(0, 3)
        self._numbers = self._count = torch.empty(0)

    @override
    def unfit(self, members: Members) -> str:
        trained = [id(p) for parameters in members.phases.values() for p in parameters]
        if len(set(trained)) < len(trained):
            return "Adam trains a parameter in several phases of a session"
        return super().unfit(members)

    @override
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        super().train_only(parameters)
        self._count.zero_()  # their first step

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
            weight_decay=self._decay, scale=given["scale"], words=given["words"],
        )  # fmt: skip
        self._count.add_(1)


def fused_stepper(
    stepper: Stepper, layout: ModelLayout, parameters: Sequence[Tensor], *, pull: float
) -> FusedStepper | str:
    """What steps K rows in one pass as `stepper` does one, or why nothing does.

    Args:
        stepper: of the group's sessions.
        layout: of the rows.
        parameters: of the module, all of them trained, in the order of the layout.
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
        return FusedSGD(stepper, layout, parameters, pull=pull)
    optimizer = stepper.plain_optimizer if isinstance(stepper, OptimizerStepper) else None
    if isinstance(optimizer, optim.Adam) and type(optimizer) in (optim.Adam, optim.AdamW):
        group = optimizer.param_groups[0]
        tensors = any(isinstance(number, Tensor) for number in (group["lr"], *group["betas"]))
        if group["eps"] > 0 and not tensors and not any(map(group.get, _VARIANTS)):
            return (
                f"{_RECEIVED} with Adam" if pull else FusedAdam(optimizer, layout, stepper.clipping)
            )
    return "its optimiser is not plain SGD, Adam, AdamW or ASPG"
