"""A network as an extractor of features and a head on top of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.utils.errors import UserError, require


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
    the key names the layer if no linear layer gives the logits, it is called more than
    once, or its inputs are not vectors.
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


@dataclass(frozen=True)
class _Call:
    """A call of a linear layer, and the version of its output when it left the layer."""

    layer: str
    inputs: Tensor
    output: Tensor
    version: int


def _linear_calls(net: nn.Module, batch: Tensor) -> tuple[list[_Call], Any]:
    """The calls of a network's linear layers in a forward pass, and its result."""
    calls: list[_Call] = []

    def record(
        name: str, _: nn.Module, args: Sequence[Tensor], named: Mapping[str, Tensor], out: Tensor
    ) -> None:
        (inputs,) = (*args, *named.values())
        calls.append(_Call(name, inputs, out, out._version))

    handles = [
        # Before all other hooks, so that none of them can replace the output.
        module.register_forward_hook(partial(record, name), prepend=True, with_kwargs=True)
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        return calls, _evaluate(net, batch)
    finally:
        for handle in handles:
            handle.remove()


def _cut(net: nn.Module, batch: Tensor, key: str) -> tuple[nn.Module, nn.Module]:
    """The network without its last linear layer, and that layer."""
    calls, result = _linear_calls(net, batch)
    kind, fix = type(net).__name__, "use another network, or give it extractor and head"
    require(bool(calls), key, f"{kind}: no linear layer of it gives the logits", fix)
    heads = [c for c in calls if c.output is result and c.output._version == c.version]
    found = f"{kind}: its last linear layer, {calls[-1].layer}, does not give the logits"
    require(bool(heads), key, found, fix)
    head = heads[-1]
    times = sum(call.layer == head.layer for call in calls)
    require(times == 1, key, f"{kind}: its head {head.layer} is called {times} times", fix)
    found = f"{kind}: its head {head.layer} is given {tuple(head.inputs.shape)}, not vectors"
    require(head.inputs.dim() == 2, key, found, fix)
    if not head.layer:
        return nn.Identity(), net
    layer = net.get_submodule(head.layer)
    net.set_submodule(head.layer, nn.Identity())
    return net, layer


@torch.no_grad()
def _evaluate(module: nn.Module, batch: Tensor) -> Any:
    with evaluating(module):
        return module(batch)
