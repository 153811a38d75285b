"""Operators of K clients at once that give each client the bits of a session of its own."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightfed.utils.rng import Draws

_ALIGNED = 32  # elements: 64 bytes in half precision


def aligned(x: Tensor) -> Tensor:
    """Each client's part of (K, ...) at an aligned address, as that of a client alone.

    The bits of a product of matrices depend on the alignment of its operands.
    """
    count = x[0].numel()
    if x.device.type != "cpu" or count % _ALIGNED == 0:
        return x.contiguous()
    padded = x.new_empty(len(x), count + -count % _ALIGNED)[:, :count]
    return padded.view(x.shape).copy_(x)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """K products of matrices, each at an aligned address too."""
    shape = len(left), left.shape[1], right.shape[2]
    count = shape[1] * shape[2]
    if left.device.type != "cpu" or count % _ALIGNED == 0:
        return torch.bmm(left, right)
    out = left.new_empty(len(left), count + -count % _ALIGNED)[:, :count].unflatten(1, shape[1:])
    return torch.bmm(left, right, out=out)


class _Product(torch.autograd.Function):
    """K products of matrices; every one in the order of `F.linear` and of its derivative."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        """(K, N, I), (K, I, O), and a bias that broadcasts to (K, N, O) -> (K, N, O)."""
        ctx.save_for_backward(left, right)
        ctx.bias = None if bias is None else bias.shape
        return _product(left, right) if bias is None else torch.baddbmm(bias, left, right)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        grad, (for_left, for_right, for_bias) = aligned(grads[0]), ctx.needs_input_grad
        return (
            _product(grad, right.transpose(1, 2)) if for_left else None,
            _transposed_product(grad, left, right) if for_right else None,
            grad.sum([i for i in (1, 2) if ctx.bias[i] == 1], keepdim=True) if for_bias else None,
        )


def _transposed_product(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The derivative of `right`, computed in its memory order."""
    if right.transpose(1, 2).is_contiguous() or right.stride(1) == 1:
        return _product(grad.transpose(1, 2), left).transpose(1, 2)
    return _product(left.transpose(1, 2), grad)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """K linear layers, (K, B, ..., I) -> (K, B, ..., O), with the bits of `F.linear` for each."""
    x, weight, bias = _cast(x, weight, bias)
    flat = aligned(x.reshape(len(x), -1, x.shape[-1]))
    row = None if bias is None else bias.unsqueeze(1)
    out: Tensor = _Product.apply(flat, weight.transpose(1, 2), row)
    return out.view(*x.shape[:-1], out.shape[-1])


def linear_of_columns(weight: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """(K, O, I) of (K, I, N) -> (K, O, N), with a bias (K, O)."""
    columns, weight, bias = _cast(columns, weight, bias)
    column = None if bias is None else bias.unsqueeze(2)
    out: Tensor = _Product.apply(weight, aligned(columns), column)
    return out


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product in the type of autocast."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


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


def dropout(x: Tensor, p: float, draws: Draws) -> Tensor:
    """Dropout of (K, ...), each client's draws from its stream."""
    if p == 0:
        return x
    if p == 1:
        return torch.zeros_like(x)
    # Filled and scaled as torch does for one client on a CPU, hence the same draws.
    noise = torch.empty_like(x, memory_format=torch.contiguous_format)
    return x * draws().bernoulli_(noise, 1 - p).div_(1 - p)


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
    def forward(x: Tensor, draws: Draws) -> Tensor:
        raise NotImplementedError("only below a vmap over clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: it has no derivative."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, draws: Draws) -> tuple[Tensor, int]:
        stacked = x if in_dims[0] is None else x.movedim(in_dims[0], 0)[0]
        shape = info.batch_size, *stacked.shape
        return draws().uniform_(torch.empty(shape, device=x.device)), 0


# Functions with other bits for the last elements of a tensor on a CPU: what does not fill two
# vectors is left to another implementation. Arithmetic and roots are exact in both.
INEXACT = (
    torch.exp, torch.exp2, torch.expm1, torch.log, torch.log1p, torch.log2, torch.log10,
    torch.sigmoid, torch.tanh, torch.sin, torch.cos, torch.tan, torch.atan, torch.erf, torch.pow,
    F.sigmoid, F.tanh, F.gelu, F.silu, F.mish, F.elu, F.selu, F.celu, F.softplus, F.logsigmoid,
)  # fmt: skip
_BY_NAME = {function.__name__.lstrip("_"): function for function in INEXACT}
_VECTORS = 32  # elements of two vectors, of any CPU
_SERIAL = 1 << 15  # torch splits larger tensors over threads
_SAMPLE = 1024  # rows on which two ways to compute a loss are compared


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An element-wise function of one client's tensor, with bits that depend on that alone."""
    if x.device.type != "cpu":
        return function(x)
    padded = F.pad(x.flatten(), (0, -x.numel() % _VECTORS))
    return function(padded)[: x.numel()].view(x.shape)


def each_in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An element-wise function of K clients' tensors, (K, ...)."""
    if x.device.type != "cpu":
        return function(x)
    flat = x.flatten(1)
    padded = F.pad(flat, (0, -flat.shape[1] % _VECTORS))
    parts = padded.split(max(1, _SERIAL // padded.shape[1]))
    found = torch.cat([function(part) for part in parts]) if len(parts) > 1 else function(padded)
    return found[:, : flat.shape[1]].view(x.shape)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) losses of (N, C) logits, by columns where that has the bits of `F.cross_entropy`.

    Torch's softmax takes rows that are shorter than a vector element by element: those of 10
    classes take ten times as long as columns.
    """
    float32 = logits.dtype == torch.float32 and not torch.is_autocast_enabled(logits.device.type)
    if logits.device.type != "cpu" or not float32 or not _columns_agree(logits.shape[1]):
        return F.cross_entropy(logits, labels, reduction="none")
    return _by_columns(logits, labels)


def _by_columns(logits: Tensor, labels: Tensor) -> Tensor:
    columns = F.pad(logits.t(), (0, -len(logits) % _VECTORS))
    found = F.log_softmax(columns, 0)[:, : len(logits)]
    return F.nll_loss(found.t(), labels, reduction="none")


@cache
def _columns_agree(classes: int) -> bool:
    """Whether both ways add up in the same order on this processor, seen on a sample."""
    generator = torch.Generator().manual_seed(classes)
    with torch.inference_mode(False), torch.enable_grad():
        x = (3 * torch.randn(_SAMPLE, classes, generator=generator)).requires_grad_()
        y = torch.arange(_SAMPLE) % classes
        found = [way(x, y) for way in (partial(F.cross_entropy, reduction="none"), _by_columns)]
        grads = [torch.autograd.grad(losses.sum(), x)[0] for losses in found]
    return torch.equal(*found) and torch.equal(*grads)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = _Linear.apply(input, weight, bias)
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
        if func is torch.rand_like:
            return _Uniform.apply(args[0], self._draws)
        if func is F.scaled_dot_product_attention and args[0].device.type != "cpu":
            # Below a vmap torch sees no gradients, and a card's own kernel keeps nothing for them.
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **given)
        if func is F.group_norm:  # clients may lie apart, at aligned addresses
            args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        inexact = _BY_NAME.get(getattr(func, "__name__", "").lstrip("_"))
        if inexact is None or func.__name__.endswith("_") or not isinstance(args[0], Tensor):
            return func(*args, **given)
        if len(args) > 1 and any(isinstance(arg, Tensor) for arg in args[1:]):
            return func(*args, **given)
        return self._inexact(func, *args, **given)

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

    def _inexact(
        self,
        func: Callable[..., Tensor],
        x: Tensor,
        *args: Any,
        inplace: bool = False,
        **given: Any,
    ) -> Tensor:
        found = in_whole_vectors(lambda part: func(part, *args, **given), x)
        return x.copy_(found) if inplace else found

    def _drop(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        out: Tensor = _Dropout.apply(input, p, self._draws)
        return input.copy_(out) if inplace else out
