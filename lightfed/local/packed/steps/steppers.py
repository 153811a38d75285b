"""Optimiser steps on K rows at once, with the bits of one row at a time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from typing_extensions import override

from lightfed.local.optimizer import (
    Clipping,
    FlatGradient,
    GradientHook,
    Params,
    Stepper,
    apart,
)
from lightfed.local.packed.steps.tensors import Members
from lightfed.local.steppers.sgd import SGDStepper
from lightfed.local.steppers.torch_optimizer import OptimizerStepper

# Their step of an element depends on the gradients of that element alone.
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
)


class PackedStepper(ABC):
    """Updates K rows from the gradients of K clients.

    Attributes:
        masks: its steps apply the clients' masks.
    """

    masks = False

    @abstractmethod
    def reset(
        self, rows: Tensor, values: Params, members: Members, *, span: int, lr: float | None
    ) -> None:
        """Start the sessions of some clients.

        Args:
            rows: (K, P) of the clients; there may be more rows than clients.
            values: (K, *shape) views of the trained parameters.
            members: the clients, with their pulls, masks and changes to gradients.
            span: length of the leading part of a row that holds the parameters.
            lr: learning rate of the round; None keeps the optimiser's own.
        """

    @abstractmethod
    def step(self, grads: Sequence[Tensor | None], clients: int) -> None:
        """Update the first `clients` rows from (clients, *shape) gradients; fewer from now on."""

    def train_only(self, parameters: Sequence[Tensor]) -> None:  # noqa: B027 - few steppers care
        """From now on only these parameters of the module get gradients.

        Raises:
            UserError: the optimiser moves all parameters at once.
        """

    def finish(self) -> None:  # noqa: B027 - few steppers care
        """Called after the sessions: the rows must then hold the models."""


def packed_stepper(
    stepper: Stepper, trainable: Sequence[Tensor], *, pulls: bool
) -> PackedStepper | str:
    """The stepper of K rows that does what `stepper` does to one.

    Args:
        stepper: of the group's sessions.
        trainable: the parameters that the optimiser should have.
        pulls: the algorithm pulls its sessions towards another model.

    Returns:
        the stepper, or why there is none.
    """
    if isinstance(stepper, SGDStepper) and type(stepper).step is SGDStepper.step:
        if pulls or type(stepper) is not SGDStepper:
            return RowByRow(stepper)
        return StackedSGD(stepper)
    if not isinstance(stepper, OptimizerStepper):
        return "its optimiser has a stepper of its own"
    optimizer = stepper.plain_optimizer
    if optimizer is None:
        return "its optimiser has a scheduler, a loss scaler, hooks or several parameter groups"
    if [id(p) for p in optimizer.param_groups[0]["params"]] != [id(p) for p in trainable]:
        return "its optimiser has a part of the parameters"
    if optimizer.param_groups[0].get("fused"):
        return "its optimiser is fused, and takes the parameters of one client"
    if type(optimizer) not in _ELEMENTWISE:
        return f"{type(optimizer).__name__} may mix the parameters of a tensor"
    if pulls:
        return f"{type(optimizer).__name__} with a pull towards another model"
    return StackedOptimizer(optimizer, stepper.clipping)


class RowByRow(PackedStepper):
    """The steps of one row's stepper, for every row.

    Args:
        stepper: copied for every row.
    """

    def __init__(self, stepper: SGDStepper) -> None:
        self._stepper = stepper
        self._rows: list[SGDStepper] = []
        self._values: list[Params] = []
        self._hooks: Sequence[GradientHook | None] = ()

    @override
    def reset(
        self, rows: Tensor, values: Params, members: Members, *, span: int, lr: float | None
    ) -> None:
        self._hooks = members.hooks
        self._values = _by_client(values)
        self._rows += [self._stepper.twin() for _ in range(len(rows) - len(self._rows))]
        for stepper, row, mine, proximal in zip(
            self._rows, rows, self._values, members.proximals, strict=False
        ):
            stepper.reset(lr, mine, row[:span], proximal)

    @override
    def step(self, grads: Sequence[Tensor | None], clients: int) -> None:
        used = [i for i, grad in enumerate(grads) if grad is not None]
        theirs = _by_client([grad for grad in grads if grad is not None])
        for client, mine in enumerate(theirs):
            values = [self._values[client][i] for i in used]
            self._rows[client].update(values, mine, used, self._hooks[client])

    @override
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        self._stepper.train_only(parameters)

    @override
    def finish(self) -> None:
        for stepper, _ in zip(self._rows, self._values, strict=False):
            stepper.finish()


class _Stacked(PackedStepper):
    """One update for all rows, after each client's hook and clipping."""

    def __init__(self, clipping: Clipping | None) -> None:
        self._clipping = clipping
        self._values: Params = []
        self._hooks: Sequence[GradientHook | None] = ()
        self._flat: list[FlatGradient] = []
        self._clients = 0

    @override
    def reset(
        self, rows: Tensor, values: Params, members: Members, *, span: int, lr: float | None
    ) -> None:
        self._values, self._hooks, self._clients = values, members.hooks, len(rows)
        self._flat = []
        if any(hook is not None for hook in self._hooks):
            mine = zip(_by_client(values), rows, strict=True)
            self._flat = [FlatGradient(parts, row[:span]) for parts, row in mine]
        self._start(lr)

    @override
    def step(self, grads: Sequence[Tensor | None], clients: int) -> None:
        used = [i for i, grad in enumerate(grads) if grad is not None]
        found = [grad for grad in grads if grad is not None]
        if self._flat or self._clipping is not None:
            found = apart(found)
            self._adjust(found, used)
        if clients < self._clients:
            self._clients = clients
            self._values = [value[:clients] for value in self._values]
            self._narrow(clients)
        self._update([self._values[i] for i in used], found, used)

    def _adjust(self, grads: Params, used: list[int]) -> None:
        """Apply each client's hook, then clip its gradients."""
        for client, mine in enumerate(_by_client(grads)):
            hook = self._hooks[client]
            if hook is not None:
                torch._foreach_copy_(mine, self._flat[client].changed(hook, mine, used))
            if self._clipping is not None:
                self._clipping(mine, used)

    @abstractmethod
    def _start(self, lr: float | None) -> None:
        """Clear the optimiser's state."""

    @abstractmethod
    def _narrow(self, clients: int) -> None:
        """Keep the optimiser's state of the first clients only."""

    @abstractmethod
    def _update(self, values: Params, grads: Params, used: list[int]) -> None:
        """Update the used values in place."""


class StackedSGD(_Stacked):
    """torch.optim.SGD."""

    def __init__(self, stepper: SGDStepper) -> None:
        super().__init__(stepper.clipping)
        self._stepper = stepper.twin()
        self._stepper.clipping = None

    @override
    def _start(self, lr: float | None) -> None:
        self._stepper.reset(lr, self._values, torch.empty(0), None)

    @override
    def _narrow(self, clients: int) -> None:
        self._stepper.narrow(clients)

    @override
    def _update(self, values: Params, grads: Params, used: list[int]) -> None:
        self._stepper.update(values, grads, used, None)


class StackedOptimizer(_Stacked):
    """Another optimiser whose steps are element by element, on (K, *shape) parameters."""

    def __init__(self, optimizer: Optimizer, clipping: Clipping | None) -> None:
        super().__init__(clipping)
        known = signature(type(optimizer).__init__).parameters
        group = optimizer.param_groups[0]
        self._options = {k: v for k, v in group.items() if k in known and k != "params"}
        self._class = type(optimizer)
        self._optimizer = optimizer
        self._settings = group  # a user's step may change them
        self._params: list[nn.Parameter] = []

    @override
    def _start(self, lr: float | None) -> None:
        self._params = [nn.Parameter(value, requires_grad=True) for value in self._values]
        options = self._options if lr is None else self._options | {"lr": lr}
        self._settings.update(options)
        self._optimizer = self._class(self._params, **options)

    @override
    def _narrow(self, clients: int) -> None:
        for param, value in zip(self._params, self._values, strict=True):
            state = self._optimizer.state[param]
            for name, kept in state.items():
                if isinstance(kept, Tensor) and kept.shape == param.shape:
                    state[name] = kept[:clients]
            param.data = value

    @override
    def _update(self, values: Params, grads: Params, used: list[int]) -> None:
        for i, grad in zip(used, grads, strict=True):
            self._params[i].grad = grad
        self._optimizer.param_groups[0].update({k: self._settings[k] for k in self._options})
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _by_client(stacked: Params) -> list[Params]:
    """(K, *shape) tensors -> the tensors of each client, as views."""
    return [list(parts) for parts in zip(*(x.unbind() for x in stacked), strict=True)]
