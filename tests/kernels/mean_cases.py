"""Rows, masks and neighbors for the tests of masked_mean, and its comparison with the reference."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightfed_kernels.masked_mean import (
    Neighbours,
    masked_mean,
)
from lightfed_kernels.masks import pack_mask
from lightfed_kernels.reference import masked_mean as reference
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"
# Fills the memory around an output, where nothing may be written.
CANARY = 7.0
LISTS = [[0, 1, 2], [3], [4, 0, 1, 2], [2, 4]]
WEIGHTS = [[1.0, 2.0, 0.5], [3.0], [1.0, 0.25, 2.0, 3.0], [1.5, 1.0]]


@dataclass(frozen=True)
class Bound:
    """The largest error relative to the largest value of the inputs, by backend."""

    torch: float
    interpreted: float
    compiled: float


BOUNDS = {
    torch.float32: Bound(1e-6, 1e-6, 1e-6),
    # The interpreter truncates where hardware rounds.
    torch.bfloat16: Bound(4e-3, 1e-2, 4e-3),
    torch.float64: Bound(1e-14, 1e-14, 1e-14),
}


def bound(dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest relative error on the backend under test."""
    bounds = BOUNDS[dtype]
    if device.type == "cuda":
        return bounds.compiled
    if os.environ["LIGHTFED_KERNELS"] == "triton":
        return bounds.interpreted
    return bounds.torch


def bits(*shape: int, density: float, seed: int) -> Tensor:
    """Draw a mask, of bool, in which a share of the elements is True."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator) < density


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draw normal values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def banded(
    receivers: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return a buffer of canaries, and the output in its middle, (receivers, size) of NaN."""
    buffer = torch.full((receivers + 2, size + 64), CANARY, dtype=dtype, device=device)
    out = buffer[1:-1, 32:-32]
    out.fill_(float("nan"))
    return buffer, out


def canaries_live(buffer: Tensor) -> bool:
    """Whether nothing has been written around the output of a buffer of `banded`."""
    around = torch.ones_like(buffer, dtype=torch.bool)
    around[1:-1, 32:-32] = False
    return bool((buffer[around] == CANARY).all())


def run(
    device: torch.device,
    x: Tensor,
    lists: list[list[int]],
    *,
    masks: Tensor | None = None,
    receivers: Tensor | None = None,
    weights: list[list[float]] | None = None,
    over: Any = "covered",
) -> Tensor:
    """Return the mean on a device, after comparing it with the reference.

    Args:
        device: The device of the backend under test.
        x: (senders, P).
        lists: The senders of every receiver.
        masks: (senders, P) bool; None covers everything.
        receivers: (receivers, P) bool; None keeps everything.
        weights: As `lists`; None weighs all the same.
        over: As for `masked_mean`.
    """
    neighbours = Neighbours.build(lists, senders=len(x), weights=weights)
    buffer, out = banded(len(lists), x.shape[1], x.dtype, device)
    mean = masked_mean(
        x.to(device),
        neighbours,
        masks=None if masks is None else pack_mask(masks).to(device),
        receivers=None if receivers is None else pack_mask(receivers).to(device),
        over=over,
        out=out,
    )
    assert mean is out
    assert canaries_live(buffer)

    expected = reference.masked_mean(
        x, lists, masks=masks, receivers=receivers, weights=weights, over=over
    )
    scale = float(x.double().nan_to_num(0, 0, 0).abs().max().clamp(min=1e-30))
    torch.testing.assert_close(
        mean.cpu().double(), expected, rtol=0, atol=scale * bound(x.dtype, device), equal_nan=True
    )
    return mean.cpu().clone()
