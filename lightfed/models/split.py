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
    """head(extractor(x)): (B, ...) -> (B, feature_dim) -> (B, C) logits."""

    def __init__(self, extractor: nn.Module, head: nn.Module, *, feature_dim: int) -> None:
        super().__init__()
        self.extractor, self.head, self.feature_dim = extractor, head, feature_dim

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C) logits."""
        return self.head(self.extractor(x))


def split(net: nn.Module, batch: Tensor, *, key: str = "model") -> SplitNetwork:
    """Split a network into its parts, without copying.

    A network may define the attributes `extractor` and `head`. Otherwise the head is the linear
    layer that gives the network's output in a forward pass in evaluation, and the extractor is the
    network with an identity in its place. The batch (B, ...) may have any values. A UserError with
    the key if no linear layer gives the logits, or its inputs are not vectors.
    """
    extractor, head = getattr(net, "extractor", None), getattr(net, "head", None)
    if not isinstance(extractor, nn.Module) or not isinstance(head, nn.Module):
        extractor, head = _cut(net, batch, key)
    return SplitNetwork(extractor, head, feature_dim=feature_dim(extractor, batch, key))


def feature_dim(extractor: nn.Module, batch: Tensor, key: str = "model") -> int:
    """Number of features of an extractor, from a forward pass in evaluation.

    The batch (B, ...) may have any values. A UserError with the key if its outputs are not
    vectors.
    """
    features = _evaluate(extractor, batch)
    if not isinstance(features, Tensor) or features.dim() != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        found = f"the extractor {type(extractor).__name__} gives {shape} for {tuple(batch.shape)}"
        raise UserError(key, found, "it must give one vector per sample: (B, features)")
    return features.shape[1]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode; restores the mode of every part afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _cut(net: nn.Module, batch: Tensor, key: str) -> tuple[nn.Module, nn.Module]:
    """The network without its last linear layer, and that layer."""
    outputs: list[tuple[str, Tensor]] = []  # of linear layers, by their names

    def record(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        outputs.append((name, output))

    handles = [
        layer.register_forward_hook(partial(record, name))
        for name, layer in net.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        result = _evaluate(net, batch)
    finally:
        for handle in handles:
            handle.remove()
    head = next((name for name, output in reversed(outputs) if output is result), None)
    if head is None:
        found = f"{type(net).__name__}: no linear layer of it gives the logits"
        raise UserError(key, found, "use another network, or give it extractor and head")
    if not head:
        return nn.Identity(), net
    layer = net.get_submodule(head)
    net.set_submodule(head, nn.Identity())
    return net, layer


@torch.no_grad()
def _evaluate(module: nn.Module, batch: Tensor) -> Any:
    with evaluating(module):
        return module(batch)
