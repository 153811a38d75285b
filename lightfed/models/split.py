"""A network as an extractor of features and a head on top of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.utils.errors import UserError


class SplitNetwork(nn.Module):
    """A network that computes head(extractor(x)).

    Args:
        extractor: Maps inputs (B, ...) to features (B, feature_dim).
        head: Maps features to logits (B, C).
        feature_dim: The number of features.
    """

    packs = True  # see lightfed.packs.known_layers

    def __init__(self, extractor: nn.Module, head: nn.Module, *, feature_dim: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = head
        self.feature_dim = feature_dim

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, C) of inputs (B, ...)."""
        return self.head(self.extractor(x))


def split(net: nn.Module, batch: Tensor, *, key: str = "model") -> SplitNetwork:
    """Split a network into its extractor and its head, without copying.

    A network may define them as attributes `extractor` and `head`. Otherwise the head is the linear
    layer that gives the network's output in a forward pass in evaluation, and the extractor is the
    network with an identity in its place.

    Args:
        net: The network.
        batch: Inputs (B, ...), of any values.
        key: The key of the network, for errors.

    Raises:
        UserError: If no linear layer gives the logits, or its inputs are not vectors.
    """
    extractor = getattr(net, "extractor", None)
    head = getattr(net, "head", None)
    if not isinstance(extractor, nn.Module) or not isinstance(head, nn.Module):
        extractor, head = _cut(net, batch, key)
    return SplitNetwork(extractor, head, feature_dim=feature_dim(extractor, batch, key))


def feature_dim(extractor: nn.Module, batch: Tensor, key: str = "model") -> int:
    """Return the number of features of an extractor, by a forward pass in evaluation.

    Args:
        extractor: The extractor.
        batch: Inputs (B, ...), of any values.
        key: The key of the network, for errors.

    Raises:
        UserError: If its outputs are not vectors.
    """
    features = _evaluate(extractor, batch)
    if isinstance(features, Tensor) and features.dim() == 2:
        return features.shape[1]

    is_tensor = isinstance(features, Tensor)
    output = tuple(features.shape) if is_tensor else type(features).__name__
    raise UserError(
        key=key,
        found=f"the extractor {type(extractor).__name__} gives {output} for {tuple(batch.shape)}",
        fix="it must give one vector per sample: (B, features)",
    )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode within a context; then every submodule gets its mode back."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, was_training in modes:
            submodule.training = was_training


def _cut(net: nn.Module, batch: Tensor, key: str) -> tuple[nn.Module, nn.Module]:
    """Return a network without its last linear layer, and that layer.

    Raises:
        UserError: If the network's output is not that of a linear layer.
    """
    outputs: list[tuple[str, Tensor]] = []  # of linear layers, in the order of their calls

    def record(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        outputs.append((name, output))

    handles = [
        layer.register_forward_hook(partial(record, name))
        for name, layer in net.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        logits = _evaluate(net, batch)
    finally:
        for handle in handles:
            handle.remove()

    head = next((name for name, output in reversed(outputs) if output is logits), None)
    if head is None:
        raise UserError(
            key=key,
            found=f"{type(net).__name__}: no linear layer of it gives the logits",
            fix="use another network, or give it extractor and head",
        )
    is_whole_network = head == ""
    if is_whole_network:
        return nn.Identity(), net

    layer = net.get_submodule(head)
    net.set_submodule(head, nn.Identity())
    return net, layer


@torch.no_grad()
def _evaluate(module: nn.Module, batch: Tensor) -> Any:
    with evaluating(module):
        return module(batch)
