"""Operators of K clients at once that give each client the bits of a session of its own."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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


def products(left: Tensor, right: Tensor) -> Tensor:
    """(N, A, B) x (N, B, C) -> (N, A, C), each with the bits that it has alone."""
    left, right, _ = _cast(left, right, None)
    out: Tensor = _Product.apply(aligned(left), aligned(right), None)
    return out


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product in the type of autocast."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def dropout(x: Tensor, p: float, draws: Draws) -> Tensor:
    """Dropout of (K, ...), each client's draws from its stream."""
    if p == 0:
        return x
    if p == 1:
        return torch.zeros_like(x)
    # Filled and scaled as torch does for one client on a CPU, hence the same draws.
    noise = torch.empty_like(x, memory_format=torch.contiguous_format)
    return x * draws().bernoulli_(noise, 1 - p).div_(1 - p)


VECTORS = 32  # elements of two vectors, of any CPU
_SERIAL = 1 << 15  # torch splits larger tensors over threads
_SAMPLE = 1024  # rows on which two ways to compute a loss are compared


def each_in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An element-wise function of K clients' tensors, (K, ...)."""
    if x.device.type != "cpu":
        return function(x)
    flat = x.flatten(1)
    padded = F.pad(flat, (0, -flat.shape[1] % VECTORS))
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
    columns = F.pad(logits.t(), (0, -len(logits) % VECTORS))
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
