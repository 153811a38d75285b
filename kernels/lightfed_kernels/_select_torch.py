"""The torch path of selection: on the host, tensor by tensor, in numpy.

The rule is that of the kernels: a key is an unsigned number, the smallest keys win, and ties go to
the lowest index. Elements that are not candidates have the largest key.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels._bits import as_integers, select_table
from lightfed_kernels.layout import ALIGNMENT, word_bounds

# How many keys to compute at a time, so that they stay in cache.
CHUNK = 32768

# The values of a digit of 16 bits; tensors with fewer elements are not worth a histogram.
BINS = 65536

# Key of |score| for all NaN: one step above inf.
_NAN = {
    torch.bfloat16: 0x7F81,
    torch.float32: 0x7F800001,
    torch.float64: 0x7FF0000000000001,
}


@dataclass(frozen=True)
class Order:
    """The order of choice.

    Attributes:
        row: (P,) the scores, of which |score| counts; None to draw at random.
        largest: Whether the largest |score| comes first; otherwise the smallest.
        seed: The seed of a draw, as two signed 32-bit numbers, the lower half first.
    """

    row: Tensor | None
    largest: bool = False
    seed: tuple[int, int] = (0, 0)


def select(
    out: Tensor, words: Tensor, counts: Tensor, bounds: Tensor, order: Order, *,
    free: bool = False, toggle: bool = False,
) -> Tensor:  # fmt: skip
    """Choose counts[t] candidates of every tensor t, and write `out`.

    Args:
        out: (W,) int32 for the result.
        words: (W,) int32, the packed mask from which the candidates follow.
        counts: (T,) int64.
        bounds: (T, 2), as of Segments.
        order: The order of choice.
        free: Whether the candidates are the zeros of `words`, not its ones.
        toggle: Whether `out` is `words` with the chosen bits inverted; else the chosen bits.

    Returns:
        How many were chosen of every tensor, (T,) int64.
    """
    device = words.device
    # Without Triton, a GPU's tensors are copied to the host.
    words = words.cpu()
    counts = counts.cpu()
    if order.row is not None:
        order = replace(order, row=order.row.cpu())

    taken = torch.empty_like(counts)
    for tensor, (first, last) in enumerate(word_bounds(bounds)):
        words_of_tensor = words[first:last]
        candidates = words_of_tensor
        if free:
            candidates = ~candidates
            elements_of_last_word = int(bounds[tensor, 1]) % ALIGNMENT
            if elements_of_last_word:  # the rest of the word is padding, which must stay 0
                candidates[-1] &= (1 << elements_of_last_word) - 1

        chosen, number = _choose(candidates, counts[tensor], first * ALIGNMENT, order)
        taken[tensor] = number
        out[first:last] = words_of_tensor ^ chosen if toggle else chosen
    return taken.to(device)


def _choose(candidates: Tensor, count: Tensor, begin: int, order: Order) -> tuple[Tensor, int]:
    """Choose candidates of one tensor.

    Args:
        candidates: (words,) int32, the packed mask of the candidates.
        count: How many to choose.
        begin: The first element of the tensor in a row.
        order: The order of choice.

    Returns:
        (words,) int32, the packed mask of the chosen elements, and their number.
    """
    packed = candidates.view(torch.uint8).numpy()
    is_candidate = np.unpackbits(packed, bitorder="little").view(np.bool_)
    number = min(int(count), int(np.count_nonzero(is_candidate)))
    if number <= 0:
        return torch.zeros_like(candidates), 0

    if order.row is None:
        keys = _random_keys(packed, begin, order.seed)
    else:
        keys = _magnitude_keys(packed, begin, order.row, order.largest)
    threshold = _kth(keys, number)
    chosen = keys < threshold
    # The threshold may be the largest key of all, which elements that are no candidates have, too.
    ties = np.flatnonzero((keys == threshold) & is_candidate)
    chosen[ties[: number - np.count_nonzero(chosen)]] = True
    return torch.from_numpy(np.packbits(chosen, bitorder="little")).view(torch.int32), number


def _kth(keys: np.ndarray, number: int) -> np.unsignedinteger:
    """Return the number-th smallest key.

    Its upper 16 bits are found by counting, and the lower ones among the keys that share them.
    """
    if len(keys) < BINS:
        return np.partition(keys, number - 1)[number - 1]

    digits = keys >> (8 * keys.itemsize - 16)
    # bincount takes signed numbers; 16 bits do not fit into an int16.
    signed = digits.view(f"i{keys.itemsize}") if keys.itemsize > 2 else digits.astype(np.int32)
    ends = torch.bincount(torch.from_numpy(signed), minlength=BINS).cumsum(0).numpy()
    digit = int(np.searchsorted(ends, number))
    if keys.itemsize == 2:
        return keys.dtype.type(digit)

    keys_with_digit = keys[np.flatnonzero(digits == digit)]
    smaller = int(ends[digit - 1]) if digit else 0
    rank = number - 1 - smaller
    return np.partition(keys_with_digit, rank)[rank]


def _magnitude_keys(packed: np.ndarray, begin: int, row: Tensor, largest: bool) -> np.ndarray:
    """Return the keys of one tensor's elements by magnitude.

    The bits of |score| have the same order as |score|; they are inverted to select the largest.

    Args:
        packed: The packed mask of the candidates, as bytes.
        begin: The first element of the tensor in the row.
        row: (P,) the scores.
        largest: Whether the largest come first.
    """
    width = row.element_size()
    unsigned = np.dtype(f"u{width}").type
    size = len(packed) * 8
    bits = as_integers(row[begin : begin + size]).view(unsigned)
    nan = unsigned(_NAN[row.dtype])
    all_but_sign = unsigned(2 ** (8 * width - 1) - 1)
    ones_if_no_candidate = ~select_table(f"f{width}").view(unsigned)

    keys = np.empty(size, unsigned)
    for at in range(0, size, CHUNK):
        chunk = keys[at : at + CHUNK]
        np.minimum(bits[at : at + CHUNK] & all_but_sign, nan, out=chunk)
        if largest:
            np.subtract(nan, chunk, out=chunk)
        chunk |= _looked_up(ones_if_no_candidate, packed, at)
    return keys


def _random_keys(packed: np.ndarray, begin: int, seed: tuple[int, int]) -> np.ndarray:
    """Return the keys mix(mix(low ^ a) ^ mix(high ^ b)) of one tensor's elements.

    a and b are the halves of the seed, low and high the halves of the element's index.

    Args:
        packed: The packed mask of the candidates, as bytes.
        begin: The first element of the tensor in the row.
        seed: The seed, as of `Order`.
    """
    low_seed = np.uint32(seed[0] & 0xFFFFFFFF)
    high_seed = np.uint32(seed[1] & 0xFFFFFFFF)
    size = len(packed) * 8
    ones_if_no_candidate = ~select_table("f4").view(np.uint32)

    keys = np.empty(size, np.uint32)
    for at in range(0, size, CHUNK):
        chunk = keys[at : at + CHUNK]
        element = np.arange(begin + at, begin + at + len(chunk), dtype=np.int64)
        # The elements of a word share their upper half.
        high = _mix((element[::ALIGNMENT] >> 32).astype(np.uint32) ^ high_seed)
        low = _mix(element.astype(np.uint32) ^ low_seed)
        chunk[:] = _mix(low.reshape(-1, ALIGNMENT) ^ high[:, None]).reshape(-1)
        chunk |= _looked_up(ones_if_no_candidate, packed, at)
    return keys


def _looked_up(table: np.ndarray, packed: np.ndarray, begin: int) -> np.ndarray:
    """Return what a table has for the elements of a chunk: 8 numbers for every byte of the mask."""
    chunk_bytes = packed[begin // 8 : (begin + CHUNK) // 8]
    return np.take(table, chunk_bytes, axis=0, mode="clip").reshape(-1)


def _mix(h: np.ndarray) -> np.ndarray:
    """Return MurmurHash3's 32-bit finalizer of numbers, a bijection.

    It is by Austin Appleby, in the public domain.
    """
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))
