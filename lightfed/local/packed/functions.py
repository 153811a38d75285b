"""Functions of torch below a vmap over clients, with the bits of any number of clients."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightfed.local.packed.operators import VECTORS, dropout, linear, products
from lightfed.utils.rng import Draws

# Functions with other bits for the last elements of a tensor on a CPU: what does not fill two
# vectors is left to another implementation. Arithmetic and roots are exact in both.
_NAMES = """
exp exp2 expm1 log log1p log2 log10 logaddexp logaddexp2 logit sigmoid expit logsigmoid tanh sinh
cosh asinh acosh atanh sin cos tan asin acos atan atan2 erf erfc erfinv lgamma digamma pow rpow ipow
gelu silu mish elu selu celu softplus huber_loss smooth_l1_loss
"""
_INEXACT = frozenset(_NAMES.split())
_PRODUCTS = ("matmul", "__matmul__", "bmm", "mm")
_ATTENTION = {"attn_mask", "is_causal", "scale"}  # arguments that `_attention` knows


def inexact(function: Callable[..., Any]) -> bool:
    """Whether a function, or a method, has other bits at the end of a tensor."""
    name: str = getattr(function, "__name__", "")
    return name.strip("_").removeprefix("special_") in _INEXACT


def _in_whole_vectors(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """An element-wise function of one client's tensors, with bits that depend on these alone."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if tensors[0].device.type != "cpu":
        return function(*args)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    numel = shape.numel()
    padded = [
        F.pad(arg.expand(shape).flatten(), (0, -numel % VECTORS))
        if isinstance(arg, Tensor)
        else arg
        for arg in args
    ]
    return function(*padded)[:numel].view(shape)


class _Linear(torch.autograd.Function):
    """`linear` below a vmap over clients."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError("only below a vmap over clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: the derivative is that of `linear`."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        stacked = [
            None
            if part is None
            else part.expand(info.batch_size, *part.shape)
            if dim is None
            else part.movedim(dim, 0)
            for part, dim in zip((x, weight, bias), in_dims, strict=True)
        ]
        assert stacked[0] is not None
        assert stacked[1] is not None
        single = stacked[0].dim() == 2  # no batch
        out = linear(stacked[0].unsqueeze(1) if single else stacked[0], stacked[1], stacked[2])
        return out.squeeze(1) if single else out, 0


class _Matmul(torch.autograd.Function):
    """Products of matrices below a vmap over clients."""

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        return left @ right  # what no client has of its own

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: the derivative is that of `products`."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, left: Tensor, right: Tensor) -> tuple[Tensor, int]:
        stacked = [
            part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
            for part, dim in zip((left, right), in_dims, strict=True)
        ]
        batch = torch.broadcast_shapes(*(part.shape[1:-2] for part in stacked))
        most = len(batch) + 3
        both = (part[(slice(None), *[None] * (most - part.dim()))] for part in stacked)
        flat = [x.expand(-1, *batch, -1, -1).reshape(-1, *x.shape[-2:]) for x in both]
        out = products(*flat)
        return out.view(info.batch_size, *batch, *out.shape[1:]), 0


class _Dropout(torch.autograd.Function):
    """`dropout` below a vmap over clients."""

    @staticmethod
    def forward(x: Tensor, p: float, draws: Draws) -> Tensor:
        raise NotImplementedError("only below a vmap over clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: the derivative is that of `dropout`."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, p: float, draws: Draws) -> tuple[Tensor, int]:
        dim = in_dims[0]
        stacked = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return dropout(stacked, p, draws), 0


class _Uniform(torch.autograd.Function):
    """Uniform numbers like a tensor of integers or floats, below a vmap over clients."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype, draws: Draws) -> Tensor:
        raise NotImplementedError("only below a vmap over clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: it has no derivative."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype, draws: Draws
    ) -> tuple[Tensor, int]:
        stacked = x if in_dims[0] is None else x.movedim(in_dims[0], 0)[0]
        shape = info.batch_size, *stacked.shape
        return draws().uniform_(torch.empty(shape, dtype=dtype, device=x.device)), 0


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = _Linear.apply(input, weight, bias)
    return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores: Tensor = _Matmul.apply(query, key.transpose(-2, -1))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    out: Tensor = _Matmul.apply(scores.softmax(-1), value)
    return out


class PackedFunctions(TorchFunctionMode):
    """Functions below a vmap over clients, with the bits of any number of clients.

    `F.dropout` and `torch.rand_like` draw from each client's stream.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.dropout:
            return self._drop(*args, **given)
        if func is F.linear:
            return _linear(*args, **given)
        if func is F.embedding:
            return self._embed(*args, **given)
        if func is F.scaled_dot_product_attention and given.keys() <= _ATTENTION and len(args) < 5:
            return _attention(*args, **given)
        if func is F.scaled_dot_product_attention and args[0].device.type != "cpu":
            # Below a vmap torch sees no gradients, and a card's own kernel keeps nothing for them.
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **given)
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS and len(args) == 2 and not given and min(x.dim() for x in args) > 1:
            return _Matmul.apply(*args)
        if func is torch.rand_like:
            dtype = given.get("dtype") or args[0].dtype
            return _Uniform.apply(args[0], dtype, self._draws)
        if func is F.group_norm:  # clients may lie apart, at aligned addresses
            args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        if inexact(func) and any(isinstance(arg, Tensor) for arg in args):
            return self._inexact(func, *args, **given)
        return func(*args, **given)

    @staticmethod
    def _embed(
        input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **given: Any
    ) -> Tensor:
        """An embedding; that of padding is not trained, which vmap knows of one client only."""
        out = F.embedding(input, weight, None, *args, **given)
        if padding_idx is None:
            return out
        padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
        return torch.where(padding, out.detach(), out)

    @staticmethod
    def _inexact(
        func: Callable[..., Tensor], *args: Any, inplace: bool = False, **given: Any
    ) -> Tensor:
        reduction = given.pop("reduction", None)
        if reduction is not None:
            given["reduction"] = "none"
        found = _in_whole_vectors(partial(func, **given), *args)
        if reduction in ("mean", "sum"):
            return getattr(found, reduction)()
        name = func.__name__
        inplace |= name == "__ipow__" or (name.endswith("_") and not name.endswith("__"))
        return args[0].copy_(found) if inplace else found

    def _drop(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        out: Tensor = _Dropout.apply(input, p, self._draws)
        return input.copy_(out) if inplace else out
