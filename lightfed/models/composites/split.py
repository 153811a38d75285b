"""A network as an extractor of features and a head on top of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class _Calls:
    """Records inputs and outputs of a network's linear layers in a forward pass.

    Attributes:
        outputs: by a layer's name, for every call: the output, and its version when it left the
            layer.
        inputs: by a layer's name, of its last call.
    """

    def __init__(self, net: nn.Module, batch: Tensor) -> None:
        self.outputs: dict[str, list[tuple[Tensor, int]]] = {}
        self.inputs: dict[str, Tensor] = {}
        linears = [(n, m) for n, m in net.named_modules() if isinstance(m, nn.Linear)]
        handles = [
            # Before all other hooks, so that none of them can replace the output.
            module.register_forward_hook(self._hook(name), prepend=True, with_kwargs=True)
            for name, module in linears
        ]
        try:
            self.result = _evaluate(net, batch)
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def record(
            _: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
        ) -> None:
            self.outputs.setdefault(name, []).append((output, output._version))
            (self.inputs[name],) = (*args, *named.values())

        return record

    def head(self) -> str | None:
        """The layer whose unmodified output is the network's."""
        for name, calls in self.outputs.items():
            output, version = calls[-1]
            if output is self.result and output._version == version:
                return name
        return None


def _cut(net: nn.Module, batch: Tensor, key: str) -> tuple[nn.Module, nn.Module]:
    """The network without its last linear layer, and that layer."""
    calls, fix = _Calls(net, batch), "use another network, or give it extractor and head"
    name = calls.head()
    if name is None:
        last = list(calls.outputs)[-1:]
        which = f"its last linear layer, {last[0]}," if last else "no linear layer of it"
        verb = "does not give" if last else "gives"
        raise UserError(key, f"{type(net).__name__}: {which} {verb} the logits", fix)
    times, inputs = len(calls.outputs[name]), calls.inputs[name]
    if times > 1 or inputs.dim() != 2:
        why = f"called {times} times" if times > 1 else f"given {tuple(inputs.shape)}, not vectors"
        raise UserError(key, f"{type(net).__name__}: its head {name} is {why}", fix)
    if not name:
        return nn.Identity(), net
    head = net.get_submodule(name)
    net.set_submodule(name, nn.Identity())
    return net, head


@torch.no_grad()
def _evaluate(module: nn.Module, batch: Tensor) -> Any:
    with evaluating(module):
        return module(batch)
