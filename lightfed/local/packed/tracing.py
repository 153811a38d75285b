"""The graph of a network's forward pass."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import inplace_methods
from typing_extensions import override

from lightfed.models.networks.one_pixel import OnePixelConv2d


class Unknown(Exception):
    """A network has something that is not run on several clients by its graph."""


class _Symbol(fx.Proxy):
    """Notes `x += y`, of which torch's own symbol makes a sum that leaves x as it was."""


def _noted(function: Callable[..., Any]) -> Callable[..., fx.Proxy]:
    def note(symbol: fx.Proxy, *others: Any) -> fx.Proxy:
        return symbol.tracer.create_proxy("call_function", function, (symbol, *others), {})

    return note


for _name in inplace_methods:
    setattr(_Symbol, f"__{_name}__", _noted(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """Refuses what a graph forgets: layers without gradients, or in a precision of their own.

    `device` is the type of the device whose autocast is on while the network is traced.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    @override
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Symbol(node, self)

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, OnePixelConv2d) or super().is_leaf_module(m, module_qualified_name)

    @override
    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled():
            raise Unknown("a part of its forward takes no gradients")
        if not torch.is_autocast_enabled(self._device):
            raise Unknown("a part of its forward has a precision of its own")
        return super().create_node(*args, **kwargs)


def traced_network(net: nn.Module) -> fx.GraphModule:
    """The graph of a network's forward pass, if that draws nothing.

    Raises Unknown if it draws, decides on what its inputs are, or changes the precision.
    """
    before = torch.default_generator.get_state()
    device = next((p.device.type for p in net.parameters()), "cpu")
    try:
        with torch.enable_grad(), torch.autocast(device, torch.bfloat16):
            traced = fx.GraphModule(net, _Tracer(device).trace(net))
    except Exception as error:  # whatever a user's forward does with a symbol
        raise Unknown(f"{type(net).__name__} cannot be traced: {error}") from error
    finally:
        drawn = not torch.equal(torch.default_generator.get_state(), before)
        torch.default_generator.set_state(before)
    if drawn:
        raise Unknown(f"{type(net).__name__} draws in its forward")
    return traced
