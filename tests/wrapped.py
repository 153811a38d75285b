"""A quantized tensor in a few lines: what it shows is float, what it holds are integers and scales.

It stands for those of quantizers, which the default tests do not install.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override


class Int8(Tensor):
    """Values (out, in) as int8 with a scale for each row, (out, 1)."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> "Int8":
        made: Int8 = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=scale.dtype, device=values.device
        )
        return made

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values = values
        self.scale = scale

    @classmethod
    def of(cls, x: Tensor) -> "Int8":
        scale = x.detach().abs().amax(1, keepdim=True) / 127
        return cls((x.detach() / scale).round().to(torch.int8), scale)

    @property
    def dense(self) -> Tensor:
        return self.values * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: None, size: Any, stride: Any
    ) -> Any:
        return Int8(inner["values"], inner["scale"])

    @override
    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy and move the tensors within; compute with the dense values."""
        name = call.overloadpacket.__name__
        if name in ("detach", "clone", "alias", "_to_copy"):
            own: Int8 = args[0]
            return Int8(*(call(inner, **(kwargs or {})) for inner in (own.values, own.scale)))

        def opened(x: Any) -> Any:
            return x.dense if isinstance(x, Int8) else x

        plain = torch.utils._pytree.tree_map(opened, (args, kwargs or {}))
        return call(*plain[0], **plain[1])


def quantized(layer: nn.Linear) -> nn.Linear:
    """Return the layer itself, frozen, with a weight of 8 bits."""
    layer.requires_grad_(False)
    layer.weight = nn.Parameter(Int8.of(layer.weight), requires_grad=False)
    return layer
