"""The torch path of selection: on the host, tensor by tensor in numpy.

The rule is that of the kernels: a key is an unsigned number, the smallest keys win, and ties go to
the lowest index. Elements that are not candidates have the largest key.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels._bits import as_integers, select_table
from lightfed_kernels.layout import ALIGNMENT, word_bounds

# Number of keys to compute at a time, so that they stay in cache.
CHUNK = 32768

# Values of a digit; tensors with fewer elements are not worth a histogram.
BINS = 65536

# Key of |score| for all NaN: one step above inf.
_NAN = {
    torch.bfloat16: 0x7F81,
    torch.float32: 0x7F800001,
    torch.float64: 0x7FF0000000000001,
}


@dataclass(frozen=True)
class Order:
    """The order of choice: smallest or largest |row| first, or random by a seed of two int32."""

    row: Tensor | None
    largest: bool = False
    seed: tuple[int, int] = (0, 0)


def select(
    out: Tensor, words: Tensor, counts: Tensor, bounds: Tensor, order: Order, *,
    free: bool = False, toggle: bool = False,
) -> Tensor:  # fmt: skip
    """Choose counts[t] candidates of every tensor, write `out`; how many were taken, (T,) int64.

    free: candidates are the zeros of `words`, not its ones.
    toggle: `out` is `words` with the chosen bits inverted, else the chosen bits.
    """
    device = words.device
    # Without Triton, a GPU's tensors are copied to the host.
    words, counts = words.cpu(), counts.cpu()
    order = order if order.row is None else replace(order, row=order.row.cpu())
    taken = torch.empty_like(counts)
    for tensor, (first, last) in enumerate(word_bounds(bounds)):
        candidates = words[first:last]
        if free:
            candidates = ~candidates
            tail = int(bounds[tensor, 1]) % ALIGNMENT
            if tail:
                candidates[-1] &= (1 << tail) - 1
        chosen = _by_partition(candidates, counts[tensor], first * ALIGNMENT, order)
        taken[tensor] = chosen[1]
        out[first:last] = words[first:last] ^ chosen[0] if toggle else chosen[0]
    return taken.to(device)


def _by_partition(
    candidates: Tensor, count: Tensor, begin: int, order: Order
) -> tuple[Tensor, int]:
    """Words of the chosen elements of one tensor, and their number."""
    packed = candidates.view(torch.uint8).numpy()
    allowed = np.unpackbits(packed, bitorder="little").view(np.bool_)
    number = min(int(count), int(np.count_nonzero(allowed)))
    if number <= 0:
        return torch.zeros_like(candidates), 0
    if order.row is None:
        keys = _random_keys(packed, begin, order.seed)
    else:
        keys = _magnitude_keys(packed, begin, order.row, order.largest)
    threshold = _kth(keys, number)
    chosen = keys < threshold
    # The largest key of all may belong to a candidate too.
    equal = np.flatnonzero((keys == threshold) & allowed)
    chosen[equal[: number - np.count_nonzero(chosen)]] = True
    return torch.from_numpy(np.packbits(chosen, bitorder="little")).view(torch.int32), number


def _kth(keys: np.ndarray, number: int) -> np.unsignedinteger:
    """The number-th smallest key: first its upper 16 bits by counting, then the lower ones."""
    if len(keys) < BINS:
        return np.partition(keys, number - 1)[number - 1]
    top = keys >> (8 * keys.itemsize - 16)
    signed = top.view(f"i{keys.itemsize}") if keys.itemsize > 2 else top.astype(np.int32)
    ends = torch.bincount(torch.from_numpy(signed), minlength=BINS).cumsum(0).numpy()
    digit = int(np.searchsorted(ends, number))
    if keys.itemsize == 2:
        return keys.dtype.type(digit)
    same = keys[np.flatnonzero(top == digit)]
    rank = number - 1 - (int(ends[digit - 1]) if digit else 0)
    return np.partition(same, rank)[rank]


def _magnitude_keys(packed: np.ndarray, begin: int, row: Tensor, largest: bool) -> np.ndarray:
    """Bits of |score|, which have the same order; inverted to select the largest."""
    width = row.element_size()
    size, dtype = len(packed) * 8, np.dtype(f"u{width}").type
    bits = as_integers(row[begin : begin + size]).view(dtype)
    nan, absolute = dtype(_NAN[row.dtype]), dtype(2 ** (8 * width - 1) - 1)
    table = ~select_table(f"f{width}").view(dtype)
    keys = np.empty(size, dtype)
    for at in range(0, size, CHUNK):
        part = keys[at : at + CHUNK]
        np.minimum(bits[at : at + CHUNK] & absolute, nan, out=part)
        if largest:
            np.subtract(nan, part, out=part)
        part |= np.take(table, packed[at // 8 : (at + CHUNK) // 8], axis=0, mode="clip").reshape(-1)
    return keys


def _random_keys(packed: np.ndarray, begin: int, seed: tuple[int, int]) -> np.ndarray:
    """mix(mix(low ^ a) ^ mix(high ^ b)): a, b the seed, low and high halves of the index."""
    low_seed, high_seed = (np.uint32(half & 0xFFFFFFFF) for half in seed)
    size, table = len(packed) * 8, ~select_table("f4").view(np.uint32)
    keys = np.empty(size, np.uint32)
    for at in range(0, size, CHUNK):
        part = keys[at : at + CHUNK]
        element = np.arange(begin + at, begin + at + len(part), dtype=np.int64)
        # The elements of a word share their upper half.
        high = _mix((element[::ALIGNMENT] >> 32).astype(np.uint32) ^ high_seed)
        low = _mix(element.astype(np.uint32) ^ low_seed)
        part[:] = _mix(low.reshape(-1, ALIGNMENT) ^ high[:, None]).reshape(-1)
        part |= np.take(table, packed[at // 8 : (at + CHUNK) // 8], axis=0, mode="clip").reshape(-1)
    return keys


def _mix(h: np.ndarray) -> np.ndarray:
    """MurmurHash3's 32-bit finaliser (Austin Appleby, public domain), a bijection."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))
