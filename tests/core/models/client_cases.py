"""Small networks and descent for clients of several networks, and what tests of models share."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightfed.models.split import SplitNetwork


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def labels(count: int, classes: int) -> Tensor:
    return torch.arange(count) % classes


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with parameters from a named stream, not the global one."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5, generator=rng)
    return module


def network(hidden: int, seed: int = 0) -> SplitNetwork:
    """The golden files' network: 7 inputs, tanh of `hidden` units, 5 features, 4 classes."""
    base = nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Linear(hidden, 5))
    net = SplitNetwork(base, nn.Linear(5, 4), feature_dim=5)
    drawn(net, seed)
    return net


class Alone(nn.Module):
    """A network that learns from labels, by itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"hard": F.cross_entropy(self.net(x), y)}


def gradients(client: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """By parameter; zeros of those that the loss does not depend on."""
    named = dict(client.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(named.items(), grads, strict=True)
    }


def descend(
    client: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    batch: int,
    lr: float,
    epochs: int = 2,
    rates: Mapping[str, float] | None = None,
) -> None:
    """SGD on the sum of a client's losses, batches in order.

    Args:
        client: has `losses`.
        x: inputs.
        y: labels.
        batch: its size.
        lr: learning rate.
        epochs: over all samples.
        rates: learning rates of parts with their own.
    """
    rates = rates or {}
    for _ in range(epochs):
        for some, wanted in zip(x.split(batch), y.split(batch), strict=True):
            losses: dict[str, Tensor] = client.losses(some, wanted)  # type: ignore[operator]
            grads = gradients(client, torch.stack(list(losses.values())).sum())
            with torch.no_grad():
                for name, parameter in client.named_parameters():
                    parameter.sub_(rates.get(name.split(".")[0], lr) * grads[name])


def values(module: nn.Module) -> dict[str, Tensor]:
    """A copy of its state."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
