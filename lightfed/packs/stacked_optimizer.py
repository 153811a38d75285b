"""Optimizer steps of K clients at once, on stacked (K, *shape) parameters."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightfed.local.optimizer import Clipping, is_plain_sgd, rate_of

# The step of an element depends on the gradients of that element alone. So it makes no difference
# to these optimizers that a parameter has an axis of clients.
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
    """An optimizer of torch that acts element by element, on the parameters of K clients.

    The clients that finish first are the last ones: `narrow` drops them.

    Args:
        optimizer: The optimizer of one client. Its class and settings are used; it never steps.
        parameters: The trained parameters of the module, in the order of `leaves`.
        rate: The configured learning rate, to which parameter groups keep their ratio.

    Attributes:
        leaves: The parameters of the clients that still train, (active, *shape) each.
        scheduled: Settings of every group in this round besides the learning rate, as in `Stepper`.
    """

    scheduled: Mapping[str, Any] = {}

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], rate: float) -> None:
        self._kind: Any = type(optimizer)
        self._rate = rate
        self._optimizer: Optimizer | None = None
        self.leaves: list[nn.Parameter] = []
        self._momenta: list[Tensor | None] = []
        self._takes_plain_steps = False

        # An optimizer keeps more defaults than it takes as arguments.
        arguments = signature(self._kind.__init__).parameters
        self._defaults = {}
        for name, value in optimizer.defaults.items():
            if name in arguments:
                self._defaults[name] = value

        # The settings of every group, and the positions of its parameters among the leaves.
        self._groups: list[tuple[dict[str, Any], list[int]]] = []
        position_of = {id(parameter): i for i, parameter in enumerate(parameters)}
        for group in optimizer.param_groups:
            positions = [position_of[id(parameter)] for parameter in group["params"]]
            self._groups.append((group | {"params": []}, positions))

    def start(
        self, values: Sequence[Tensor], *, lr: float | None, momenta: Sequence[Tensor] | None
    ) -> None:
        """Begin sessions on values of shape (K, *shape), which are trained in place.

        Args:
            values: The trained parameters.
            lr: Learning rate of the round; None keeps the optimizer's own.
            momenta: (K, *shape) each, carried from earlier sessions; None for none.
        """
        self.leaves = [nn.Parameter(value) for value in values]
        self._momenta = [None] * len(values)

        groups = []
        for settings, positions in self._groups:
            group = dict(settings)
            if lr is not None:
                group |= self.scheduled
            group["params"] = [self.leaves[i] for i in positions]
            group["lr"] = rate_of(settings["lr"], self._rate, lr)
            groups.append(group)
        self._begin(groups)

        self._takes_plain_steps = is_plain_sgd(self.optimizer)
        if momenta is not None and self._kind is optim.SGD:
            for leaf, momentum in zip(self.leaves, momenta, strict=True):
                self.optimizer.state[leaf]["momentum_buffer"] = momentum

    def _begin(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give the optimizer other parameters and settings, and no state.

        To make one takes as long as several steps of small layers.
        """
        if self._optimizer is None:
            self._optimizer = self._kind(groups, **self._defaults)
            return

        self._optimizer.state.clear()
        for of_last_session, group in zip(self._optimizer.param_groups, groups, strict=True):
            of_last_session.update(group)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the leaves, in a session."""
        assert self._optimizer is not None, "no session has begun"
        return self._optimizer

    def narrow(self, clients: int) -> None:
        """Go on with the first clients only."""
        self._note_momenta()
        for leaf in self.leaves:
            state = self.optimizer.state[leaf]
            for name, value in state.items():
                # Other state, such as a counter of steps, is one for all clients.
                if isinstance(value, Tensor) and value.shape == leaf.shape:
                    state[name] = value[:clients]
            leaf.data = leaf.data[:clients]

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Take one step from gradients of shape (active, *shape), one for each leaf.

        Args:
            grads: None for a parameter that the loss does not depend on.
        """
        used_grads = [gradient for gradient in grads if gradient is not None]
        if self._takes_plain_steps and len(used_grads) == len(self.leaves):
            # What the step of plain SGD does, without its Python overhead.
            learning_rate = self.optimizer.param_groups[0]["lr"]
            leaves: list[Tensor] = [*self.leaves]
            with torch.no_grad():
                torch._foreach_add_(leaves, used_grads, alpha=-learning_rate)
            return

        for leaf, gradient in zip(self.leaves, grads, strict=True):
            leaf.grad = gradient
        self.optimizer.step()

    def finish(self) -> None:
        """End the sessions: after this the values must hold the models."""

    def carried(self) -> list[Tensor | None]:
        """Return SGD's momenta after the sessions, (K, *shape) each; None where there is none."""
        self._note_momenta()
        return self._momenta

    def _note_momenta(self) -> None:
        """Remember the momenta of all clients, before they are narrowed.

        SGD writes into them in place, so what is remembered has the last values of every client.
        """
        for i, leaf in enumerate(self.leaves):
            if self._momenta[i] is None:
                self._momenta[i] = self.optimizer.state[leaf].get("momentum_buffer")


def clipped(clipping: Clipping, grads: Sequence[Tensor], used: Sequence[int]) -> list[Tensor]:
    """Return gradients clipped client by client.

    Args:
        clipping: The Trainer's.
        grads: (K, *shape) each.
        used: The positions of their parameters among all that are trained.
    """
    if clipping.algorithm == "value":
        return [gradient.clamp(-clipping.limit, clipping.limit) for gradient in grads]

    # The norm of all parameters together, or of each of several networks.
    networks = [0] * len(used)
    if clipping.networks:
        networks = [clipping.networks[position] for position in used]

    norms_of: dict[int, list[Tensor]] = {}
    for gradient, network in zip(grads, networks, strict=True):
        norm = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
        norms_of.setdefault(network, []).append(norm)

    scales = {}
    for network, norms in norms_of.items():
        total = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        scales[network] = torch.clamp(clipping.limit / (total + 1e-6), max=1.0)  # (K,)

    scaled = []
    for gradient, network in zip(grads, networks, strict=True):
        ones = [1] * (gradient.dim() - 1)
        scaled.append(gradient * scales[network].view(-1, *ones))
    return scaled
