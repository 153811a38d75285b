"""Densities of a sparse model's tensors, and initial masks."""

from collections.abc import Sequence
from math import prod

import torch
from lightfed_kernels import Segments, select_random
from torch import Tensor

from lightfed.api.fleet import Fleet
from lightfed.state.client_state import Kept


def erk_densities(shapes: Sequence[tuple[int, ...]], density: float) -> list[float]:
    """Erdos-Renyi-Kernel densities of tensors, for an overall density.

    A tensor's density is eps * sum(shape) / prod(shape), at most 1: the tensors that exceed 1 the
    most are made dense and eps is solved again, until none exceeds it. Small tensors, especially
    1-D ones, stay dense. Mocanu et al. 2018; Evci et al., RigL, 2020; every tensor is maskable, as
    in the released code of DisPFL. The overall density is in (0, 1].
    """
    sizes = [prod(shape) for shape in shapes]
    raw = [sum(shape) / size if shape else 1.0 for shape, size in zip(shapes, sizes, strict=True)]
    dense: set[int] = set()
    while len(dense) < len(shapes):
        sparse = [i for i in range(len(shapes)) if i not in dense]
        wanted = sum(sizes[i] * density for i in sparse)
        wanted -= sum(sizes[i] * (1 - density) for i in dense)
        eps = wanted / sum(raw[i] * sizes[i] for i in sparse)
        largest = max(raw[i] for i in sparse)
        if largest * eps <= 1:
            return [1.0 if i in dense else eps * raw[i] for i in range(len(shapes))]
        dense |= {i for i in sparse if raw[i] == largest}
    return [1.0] * len(shapes)


def active_counts(shapes: Sequence[tuple[int, ...]], densities: Sequence[float]) -> list[int]:
    """Number of elements of every tensor at its density, rounded down."""
    return [int(d * prod(shape)) for shape, d in zip(shapes, densities, strict=True)]


def random_mask(
    segments: Segments, density: float, *, erk: bool, seed: int, device: torch.device
) -> Tensor:
    """(W,) packed mask: random elements of every tensor; with `erk` small ones stay dense."""
    shapes = [entry.shape for entry in segments.layout]
    each = erk_densities(shapes, density) if erk else [density] * len(shapes)
    counts = active_counts(shapes, each)
    return select_random(segments.live_on(device), counts, segments, seed=seed)


def keep_masks(fed: Fleet) -> Kept:
    """Let clients keep a mask: packed words (P / 32,) of the elements that one holds and trains.

    The rest of its row stays 0. Only covered values are stored. A dense client has no mask.
    """
    fed.kept.masks = fed.keep("mask")
    return fed.kept.masks
