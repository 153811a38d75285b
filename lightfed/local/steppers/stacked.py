"""Optimiser steps of K clients at once, on stacked (K, *shape) parameters."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightfed.local.optimizer import Clipping, Stepper
from lightfed.local.steppers.torch_optimizer import cannot_carry

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
        factors: of every parameter's learning rate; None for 1.
        rate: the configured one, to which groups keep their ratio; None for the first group's.

    Attributes:
        leaves: (k, *shape) parameters of the clients that still train.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        factors: Sequence[float] | None = None,
        rate: float | None = None,
    ) -> None:
        self._kind: Any = type(optimizer)
        known = signature(self._kind.__init__).parameters
        self._defaults = {k: v for k, v in optimizer.defaults.items() if k in known}
        places = {id(p): i for i, p in enumerate(parameters)}
        self._groups: list[tuple[dict[str, Any], list[int]]] = []
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            own = [places[id(p)] for p in group["params"]]
            if factors is None:
                self._groups.append((options, own))
            else:
                self._groups += [(options | {"lr": options["lr"] * factors[i]}, [i]) for i in own]
        self._rate = optimizer.param_groups[0]["lr"] if rate is None else rate
        self.leaves: list[nn.Parameter] = []
        self._momenta: list[Tensor | None] = []

    def rate(self, own: float, lr: float | None) -> float:
        """A group's learning rate in a round of rate `lr`; None keeps its own."""
        return own if lr is None else lr if own == self._rate else own * (lr / self._rate)

    def start(
        self, values: Sequence[Tensor], *, lr: float | None, momenta: Sequence[Tensor] | None
    ) -> None:
        """Begin sessions on (K, *shape) values, which are trained in place.

        `lr` is the round's, as of `rate`; `momenta` (K, *shape) are carried from other sessions.
        """
        self.leaves = [nn.Parameter(value) for value in values]
        self._momenta = [None] * len(values)
        self._optimizer: Optimizer = self._kind(
            [
                {**options, "params": [self.leaves[i] for i in places]}
                | {"lr": self.rate(options["lr"], lr)}
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

    def step(self, grads: Sequence[Tensor | None], *, left: int) -> None:
        """One step from (k, *shape) gradients, after which the first `left` clients go on."""
        for leaf, grad in zip(self.leaves, grads, strict=True):
            leaf.grad = grad
        self._optimizer.step()

    def finish(self) -> None:
        """End the sessions: the values must then hold the models."""

    def carried(self) -> list[Tensor | None]:
        """(K, *shape) momenta after the sessions; None where there is none.

        Raises:
            UserError: the optimiser keeps another state, which ends with a session.
        """
        if self._kind is not optim.SGD and any(self._optimizer.state.values()):
            raise cannot_carry(self._kind.__name__)
        self._note()
        return self._momenta

    def gaps(self) -> Tensor | None:
        """(K,) norms of the last steps' gradient mappings; None if the optimiser has none."""
        return None

    def _note(self) -> None:
        """Remember momenta of all clients, before they are narrowed."""
        for i, leaf in enumerate(self.leaves):
            if self._momenta[i] is None:
                self._momenta[i] = self._optimizer.state[leaf].get("momentum_buffer")


def stacked_optimizer(stepper: Stepper, parameters: Sequence[Tensor]) -> StackedOptimizer:
    """What does to K clients what a stepper does to one."""
    optimizer = stepper.optimizer
    assert optimizer is not None, "a group whose optimiser cannot be stacked trains alone"
    own = getattr(optimizer, "stacked", None)
    if own is not None:
        found: StackedOptimizer = own(optimizer, parameters)
        return found
    return StackedOptimizer(optimizer, parameters, stepper.factors, stepper.rate)


def clipped(clipping: Clipping, grads: Sequence[Tensor], used: Sequence[int]) -> list[Tensor]:
    """The (K, *shape) gradients of the parameters `used`, clipped client by client."""
    if clipping.algorithm == "value":
        return [grad.clamp(-clipping.limit, clipping.limit) for grad in grads]
    networks = [clipping.networks[i] if clipping.networks else 0 for i in used]
    norms = [torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in grads]
    scales = {}
    for network in set(networks):
        theirs = [s for s, own in zip(norms, networks, strict=True) if own == network]
        norm = torch.linalg.vector_norm(torch.stack(theirs), dim=0)
        scales[network] = torch.clamp(clipping.limit / (norm + 1e-6), max=1.0)
    return [
        grad * scales[network].view(-1, *[1] * (grad.dim() - 1))
        for grad, network in zip(grads, networks, strict=True)
    ]
