"""Selection in plain numpy, tensor by tensor: sort all candidates, and take the first.

Masks are (P,) of bool, and rows are (P,) of any dtype; both are on the CPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels.layout import Layout


def count_per_tensor(mask: Tensor, layout: Layout) -> list[int]:
    """Return the number of ones in every tensor."""
    return [int(layout.view(mask, entry).sum()) for entry in layout]


def select_by_magnitude(
    scores: Tensor, candidates: Tensor, counts: Sequence[int], layout: Layout, *, largest: bool
) -> Tensor:
    """Choose the first counts[t] candidates e of tensor t by (|s_e|, e), or by (-|s_e|, e)."""
    magnitude = scores.double().abs().numpy()
    # NaN is larger than inf, so whether it is NaN decides first.
    is_nan = np.isnan(magnitude)
    number = np.where(is_nan, 0.0, magnitude)
    return _first(candidates, counts, layout, [is_nan, number], largest)


def select_random(
    candidates: Tensor, counts: Sequence[int], layout: Layout, *, seed: int
) -> Tensor:
    """Choose the first counts[t] candidates e of tensor t by h(seed, e)."""
    return _first(candidates, counts, layout, [random_keys(seed, layout.size)], False)


def prune_regrow(
    weights: Tensor,
    mask: Tensor,
    counts: Sequence[int],
    layout: Layout,
    *,
    regrow: Tensor | int,
) -> Tensor:
    """Return DisPFL's next mask (algorithm 2).

    The smallest active |w| are dropped, and as many elements grow among all zeros.
    """
    dropped = select_by_magnitude(weights, mask, counts, layout, largest=False)
    kept = mask & ~dropped
    number = count_per_tensor(dropped, layout)
    free = layout.live() & ~kept
    if isinstance(regrow, Tensor):
        grown = select_by_magnitude(regrow, free, number, layout, largest=True)
    else:
        grown = select_random(free, number, layout, seed=regrow)
    return kept | grown


def random_keys(seed: int, size: int, *, first: int = 0) -> np.ndarray:
    """Return h(seed, e) of `size` elements e from `first` on.

    h(seed, e) = mix(mix(e mod 2^32 ^ a) ^ mix(floor(e / 2^32) ^ b)),  (a, b) = SplitMix64(seed)
    """
    element = np.arange(first, first + size, dtype=np.uint64)
    low = element & np.uint64(0xFFFFFFFF)
    high = element >> np.uint64(32)
    a, b = _splitmix64(seed)
    return _mix(_mix(low ^ np.uint64(a)) ^ _mix(high ^ np.uint64(b)))


def _splitmix64(seed: int) -> tuple[int, int]:
    """Return the lower and upper half of the first number of the generator with this state."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    z = z ^ (z >> 31)
    return z % 2**32, z // 2**32


def _mix(h: np.ndarray) -> np.ndarray:
    """Return MurmurHash3's 32-bit finalizer of numbers that are stored in 64 bits."""
    h = (h ^ (h >> np.uint64(16))) * np.uint64(0x85EBCA6B) & np.uint64(0xFFFFFFFF)
    h = (h ^ (h >> np.uint64(13))) * np.uint64(0xC2B2AE35) & np.uint64(0xFFFFFFFF)
    return h ^ (h >> np.uint64(16))


def _first(
    candidates: Tensor,
    counts: Sequence[int],
    layout: Layout,
    keys: Sequence[np.ndarray],
    descending: bool,
) -> Tensor:
    """Choose the first candidates of every tensor.

    Args:
        candidates: (P,) bool.
        counts: How many to choose of every tensor.
        layout: The tensors.
        keys: (P,) what decides about the order; a later key decides where earlier ones are equal,
            and the position where all are.
        descending: Whether large keys come first.
    """
    is_candidate = candidates.numpy()
    chosen = torch.zeros_like(candidates)
    for entry, count in zip(layout, counts, strict=True):
        elements = np.arange(entry.offset, entry.offset + entry.numel)
        elements = elements[is_candidate[elements]]
        ranks = [_dense_rank(key[elements], descending) for key in keys]
        order = np.lexsort(ranks[::-1])  # a stable sort, whose last key decides first
        chosen[torch.from_numpy(elements[order][:count])] = True
    return chosen


def _dense_rank(key: np.ndarray, descending: bool) -> np.ndarray:
    """Return ranks of the keys, equal for equal keys; a bool or unsigned key cannot be negated."""
    _, rank = np.unique(key, return_inverse=True)
    return -rank if descending else rank
