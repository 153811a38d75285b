"""Operators of K clients at once that give each client the bits of a session of its own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

Generators = Callable[[], Sequence[torch.Generator]]


class _Baddbmm(torch.autograd.Function):
    """K linear layers; every product in the order of `F.linear` and of its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(K, N, I), (K, O, I), (K, O) -> (K, N, O)."""
        ctx.save_for_backward(x, weight)
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, (for_x, for_weight, for_bias) = grads[0], ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if for_x else None,
            torch.bmm(grad.transpose(1, 2), x) if for_weight else None,
            grad.sum(1) if for_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """K linear layers, (K, B, ..., I) -> (K, B, ..., O), with the bits of `F.linear` for each."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    flat = x.reshape(len(x), -1, x.shape[-1])
    out: Tensor = _Baddbmm.apply(flat, weight, bias)
    return out.view(*x.shape[:-1], out.shape[-1])


def linear_of_columns(weight: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """(K, O, I) of (K, I, N) -> (K, O, N), with a bias (K, O)."""
    if torch.is_autocast_enabled(columns.device.type):
        dtype = torch.get_autocast_dtype(columns.device.type)
        weight, columns = weight.to(dtype), columns.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if bias is None:
        return torch.bmm(weight, columns)
    return torch.baddbmm(bias.unsqueeze(2), weight, columns)


def dropout(x: Tensor, p: float, generators: Generators) -> Tensor:
    """Dropout of (K, ...), each client's draws from its generator."""
    if p == 0:
        return x
    if p == 1:
        return torch.zeros_like(x)
    # Filled and scaled as torch does for one client on a CPU, hence the same draws.
    noise = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, generator in zip(noise, generators(), strict=True):
        part.bernoulli_(1 - p, generator=generator)
    return x * noise.div_(1 - p)


class _Dropout(torch.autograd.Function):
    """`dropout` below a vmap over clients."""

    @staticmethod
    def forward(x: Tensor, p: float, generators: Generators) -> Tensor:
        raise NotImplementedError("only below a vmap over clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: the derivative is that of `dropout`."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, p: float, generators: Generators
    ) -> tuple[Tensor, int]:
        dim = in_dims[0]
        stacked = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return dropout(stacked, p, generators), 0


class KeyedDropout(TorchFunctionMode):
    """Makes `F.dropout` below a vmap over clients draw from each client's generator.

    Args:
        generators: gives one for each client.
    """

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self._generators = generators

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        return self._drop(*args, **given) if func is F.dropout else func(*args, **given)

    def _drop(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        out: Tensor = _Dropout.apply(input, p, self._generators)
        return input.copy_(out) if inplace else out
