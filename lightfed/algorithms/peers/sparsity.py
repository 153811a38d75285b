"""Densities of a sparse model's tensors, and initial masks."""

from collections.abc import Sequence
from math import prod

import torch
from lightfed_kernels import Segments, select_random
from torch import Tensor

from lightfed.api.fleet import Fleet
from lightfed.state.client_state import Kept


def erk_densities(shapes: Sequence[tuple[int, ...]], density: float) -> list[float]:
    """Return the Erdos-Renyi-Kernel density of every tensor, for an overall density.

    The density of a tensor is eps * sum(shape) / prod(shape), but at most 1. The tensors that
    exceed 1 the most are made dense and eps is solved again, until none exceeds it. Small tensors,
    especially 1-D ones, stay dense. Mocanu et al. 2018; Evci et al., RigL, 2020. Every tensor is
    maskable, as in the released code of DisPFL.

    Args:
        shapes: The shape of each tensor.
        density: The share of all elements that a model has, above 0 and at most 1.
    """
    sizes = [prod(shape) for shape in shapes]
    raw = []  # sum(shape) / prod(shape), the density for eps = 1
    for shape, size in zip(shapes, sizes, strict=True):
        raw.append(sum(shape) / size if shape else 1.0)

    every_tensor = range(len(shapes))
    dense: set[int] = set()
    while len(dense) < len(shapes):
        sparse = [i for i in every_tensor if i not in dense]

        # What dense tensors have above the overall density, the sparse ones have to lack.
        elements = sum(sizes[i] * density for i in sparse)
        elements -= sum(sizes[i] * (1 - density) for i in dense)
        eps = elements / sum(raw[i] * sizes[i] for i in sparse)

        largest = max(raw[i] for i in sparse)
        if largest * eps <= 1:
            return [1.0 if i in dense else eps * raw[i] for i in every_tensor]
        dense |= {i for i in sparse if raw[i] == largest}

    return [1.0] * len(shapes)


def active_counts(shapes: Sequence[tuple[int, ...]], densities: Sequence[float]) -> list[int]:
    """Return the number of elements of every tensor at its density, rounded down."""
    counts = []
    for shape, density in zip(shapes, densities, strict=True):
        counts.append(int(density * prod(shape)))
    return counts


def random_mask(
    segments: Segments, density: float, *, erk: bool, seed: int, device: torch.device
) -> Tensor:
    """Draw a mask as packed words (W,): random elements of every tensor.

    Args:
        segments: The tensors within a row.
        density: The share of all elements that the mask has.
        erk: Whether small tensors stay dense (`erk_densities`); otherwise all have this density.
        seed: The seed of the draw.
        device: Where the mask is to be.
    """
    shapes = [entry.shape for entry in segments.layout]
    densities = erk_densities(shapes, density) if erk else [density] * len(shapes)
    counts = active_counts(shapes, densities)
    return select_random(segments.live_on(device), counts, segments, seed=seed)


def keep_masks(fed: Fleet) -> Kept:
    """Let clients keep a mask: packed words (P / 32,) of the elements that a client holds.

    It trains only these, and the rest of its row stays 0. Only covered values are stored. A client
    without a mask is dense.
    """
    fed.kept.masks = fed.keep("mask")
    return fed.kept.masks
