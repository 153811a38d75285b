"""Weights of rows, and sums over clients.

Sums over clients are held in float64 and rounded to the rows' type once. For whole-number weights
the products are exact. So are the sums, unless the magnitudes of addends differ by more
than about 2^18. The bits of a result then depend neither on the order of the clients, nor on their
placement on ranks, nor on the backend.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightfed_kernels._dispatch import checking

Weights = Sequence[float] | Tensor


def as_weights(name: str, weights: Weights | float, count: int, device: torch.device) -> Tensor:
    """(count,) float64, in host memory or on the device of the rows, as they were given."""
    if not isinstance(weights, Tensor):
        numbers = [weights] if isinstance(weights, int | float) else list(weights)
        weights = torch.tensor(numbers, dtype=torch.float64)
    if weights.numel() != count or weights.dim() > 1:
        raise ValueError(f"{name}: of shape {list(weights.shape)}; {count} numbers are needed")
    if weights.is_complex() or weights.dtype == torch.bool:
        raise TypeError(f"{name}: {weights.dtype}; real numbers are needed")
    if weights.device.type != "cpu" and weights.device != device:
        raise ValueError(f"{name}: on {weights.device}; the rows are on {device}")
    return weights.reshape(count).to(torch.float64)


def check_weights(name: str, weights: Tensor) -> None:
    """Check that weights are finite and 0 or more, unless that would wait for a device."""
    if weights.is_cuda and not checking():
        return
    for position, weight in enumerate(weights.tolist()):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"{name}[{position}]: {weight}; a weight is finite and 0 or more")


def check_sums(sums: Tensor, size: int) -> None:
    if sums.dtype != torch.float64:
        raise TypeError(f"sums: {sums.dtype}; sums over clients are torch.float64")
    if sums.dim() != 1 or sums.shape[0] != size or not sums.is_contiguous():
        raise ValueError(f"sums: of shape {list(sums.shape)}; contiguous [{size}] is needed")
