"""Selection in plain numpy, tensor by tensor: sort all candidates by what decides, take the first.

Masks are bool (P,), rows (P,) of any dtype; both on the CPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels.layout import Layout


def count_per_tensor(mask: Tensor, layout: Layout) -> list[int]:
    return [int(layout.view(mask, entry).sum()) for entry in layout]


def select_by_magnitude(
    scores: Tensor, candidates: Tensor, counts: Sequence[int], layout: Layout, *, largest: bool
) -> Tensor:
    """The first counts[t] candidates e of tensor t by (|s_e|, e), or by (-|s_e|, e)."""
    magnitude = scores.double().abs().numpy()
    # NaN is larger than inf.
    nan = np.isnan(magnitude)
    finite = np.where(nan, 0.0, magnitude)
    return _first(candidates, counts, layout, [nan, finite], largest)


def select_random(
    candidates: Tensor, counts: Sequence[int], layout: Layout, *, seed: int
) -> Tensor:
    """The first counts[t] candidates e of tensor t by h(seed, e)."""
    return _first(candidates, counts, layout, [random_keys(seed, layout.size)], False)


def prune_regrow(
    weights: Tensor,
    mask: Tensor,
    counts: Sequence[int],
    layout: Layout,
    *,
    regrow: Tensor | int,
) -> Tensor:
    """DisPFL, algorithm 2: drop the smallest active |w|, grow as many among all zeros."""
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
    """h(seed, e) = mix(mix(e mod 2^32 ^ a) ^ mix(e / 2^32 ^ b)), (a, b) = SplitMix64(seed)."""
    element = np.arange(first, first + size, dtype=np.uint64)
    a, b = (np.uint64(half) for half in _splitmix64(seed))
    low, high = element & np.uint64(0xFFFFFFFF), element >> np.uint64(32)
    return _mix(_mix(low ^ a) ^ _mix(high ^ b))


def _splitmix64(seed: int) -> tuple[int, int]:
    """The lower and upper half of the first number of the generator with this state."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    z = z ^ (z >> 31)
    return z % 2**32, z // 2**32


def _mix(h: np.ndarray) -> np.ndarray:
    """MurmurHash3's 32-bit finaliser, of numbers that are stored in 64 bits."""
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
    """Per tensor, the first candidates by the keys, the first of which decides, then by place."""
    chosen = torch.zeros_like(candidates)
    for entry, count in zip(layout, counts, strict=True):
        inside = np.arange(entry.offset, entry.offset + entry.numel)
        inside = inside[candidates.numpy()[inside]]
        ranked = [_dense_rank(key[inside], descending) for key in keys]
        order = np.lexsort(ranked[::-1])  # stable; its last key decides
        chosen[torch.from_numpy(inside[order][:count])] = True
    return chosen


def _dense_rank(key: np.ndarray, descending: bool) -> np.ndarray:
    _, rank = np.unique(key, return_inverse=True)
    return -rank if descending else rank
