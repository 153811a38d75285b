"""Optimiser steps of K clients at once, on stacked (K, *shape) parameters."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightfed.local.optimizer import Clipping, rate_of

# Their step of an element depends on the gradients of that element alone.
ELEMENTWISE = (
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


class StackedOptimizer:
    """An optimiser of torch whose step acts element by element, on the parameters of K clients.

    Clients that have finished are the last ones: `narrow` leaves them out.

    Args:
        optimizer: of one client; its class and settings are used, and it never steps.
        parameters: of the module that are trained, in the order of `leaves`.
        rate: the configured one, to which groups keep their ratio.

    Attributes:
        leaves: (k, *shape) parameters of the clients that still train.
        scheduled: as of `Stepper`.
    """

    scheduled: Mapping[str, Any] = {}

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], rate: float) -> None:
        self._kind: Any = type(optimizer)
        known = signature(self._kind.__init__).parameters
        self._defaults = {k: v for k, v in optimizer.defaults.items() if k in known}
        places = {id(p): i for i, p in enumerate(parameters)}
        self._groups = [
            (group | {"params": []}, [places[id(p)] for p in group["params"]])
            for group in optimizer.param_groups
        ]
        self._rate = rate
        self.leaves: list[nn.Parameter] = []
        self._momenta: list[Tensor | None] = []

    def start(
        self, values: Sequence[Tensor], *, lr: float | None, momenta: Sequence[Tensor] | None
    ) -> None:
        """Begin sessions on (K, *shape) values, which are trained in place.

        `lr` is the round's, as of `Stepper.reset`; `momenta` (K, *shape) are carried from others.
        """
        self.leaves = [nn.Parameter(value) for value in values]
        self._momenta = [None] * len(values)
        self._optimizer: Optimizer = self._kind(
            [
                {
                    **options,
                    **({} if lr is None else self.scheduled),
                    "params": [self.leaves[i] for i in places],
                    "lr": rate_of(options["lr"], self._rate, lr),
                }
                for options, places in self._groups
            ],
            **self._defaults,
        )
        if momenta is not None and self._kind is optim.SGD:
            for leaf, momentum in zip(self.leaves, momenta, strict=True):
                self._optimizer.state[leaf]["momentum_buffer"] = momentum

    def narrow(self, clients: int) -> None:
        """Go on with the first clients only."""
        self._note()
        for leaf in self.leaves:
            state = self._optimizer.state[leaf]
            for name, kept in state.items():
                if isinstance(kept, Tensor) and kept.shape == leaf.shape:
                    state[name] = kept[:clients]
            leaf.data = leaf.data[:clients]

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One step from (k, *shape) gradients."""
        for leaf, grad in zip(self.leaves, grads, strict=True):
            leaf.grad = grad
        self._optimizer.step()

    def finish(self) -> None:
        """End the sessions: the values must then hold the models."""

    def carried(self) -> list[Tensor | None]:
        """(K, *shape) momenta after the sessions, SGD's; None where there is none."""
        self._note()
        return self._momenta

    def _note(self) -> None:
        """Remember momenta of all clients, before they are narrowed."""
        for i, leaf in enumerate(self.leaves):
            if self._momenta[i] is None:
                self._momenta[i] = self._optimizer.state[leaf].get("momentum_buffer")


def clipped(clipping: Clipping, grads: Sequence[Tensor], used: Sequence[int]) -> list[Tensor]:
    """The (K, *shape) gradients of the parameters `used`, clipped client by client."""
    if clipping.algorithm == "value":
        return [grad.clamp(-clipping.limit, clipping.limit) for grad in grads]
    networks = [clipping.networks[i] if clipping.networks else 0 for i in used]
    norms = [torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in grads]
    scales = {}
    for network in set(networks):
        part = [s for s, n in zip(norms, networks, strict=True) if n == network]
        norm = torch.linalg.vector_norm(torch.stack(part), dim=0)
        scales[network] = torch.clamp(clipping.limit / (norm + 1e-6), max=1.0)
    return [
        grad * scales[network].view(-1, *[1] * (grad.dim() - 1))
        for grad, network in zip(grads, networks, strict=True)
    ]
