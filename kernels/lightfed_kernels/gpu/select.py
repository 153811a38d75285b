"""Exact selection in all tensors at once: a radix select, eight bits of the keys a pass.

A key is an unsigned number. The smallest keys win, and ties go to the lowest index. A pass counts,
per tensor, how often each value of the next digit occurs among the candidates whose higher digits
are those of the threshold, and then fixes that digit. The counts are sums of integers, whose order
does not matter. Everything else is written by one program.

These arguments have the same meaning in all kernels:
    row: (P,) the scores, or None to draw at random.
    words_in: (W,) int32 the packed mask from which the candidates follow.
    tiles: (N, 4) int64, as of Segments. A program of most kernels owns one tile, of at most
        WORDS * 32 elements.
    thresholds: (T,) int64 the digits of every tensor's threshold that are fixed so far.
    seed_low, seed_high: The halves of the seed.
    BITS: The bits of a key.
    LARGEST: Whether the largest scores win.
    FREE: Whether the candidates are the elements of a tensor whose bit is 0, not those where it
        is 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._select_torch import Order
from lightfed_kernels.gpu.masks import count_ones, on_device, ranks
from lightfed_kernels.layout import TILE

WORDS = TILE // 32
WARPS = 8

# Values of a digit.
BINS = 256

# Bits of a key.
KEY_BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float64: 64}


@triton.jit
def mix(h):
    """MurmurHash3's 32-bit finalizer (Austin Appleby, public domain), a bijection."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _elements(WORDS: tl.constexpr):
    """(WORDS, 32) the elements of a tile, counted from its first."""
    return tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def _random_keys(begin, seed_low, seed_high, WORDS: tl.constexpr):
    """(WORDS, 32) uint32 mix(mix(low ^ a) ^ mix(high ^ b)).

    a and b are the halves of the seed, low and high the halves of the element's index. `begin` is
    the first word of the tile.
    """
    low = (begin * 32).to(tl.uint32) + _elements(WORDS).to(tl.uint32)
    # All elements of a word have the same upper half.
    high = ((begin + tl.arange(0, WORDS)) >> 27).to(tl.uint32)
    high = mix(high ^ seed_high.to(tl.uint32))
    return mix(mix(low ^ seed_low.to(tl.uint32)) ^ high[:, None])


@triton.jit
def _magnitude_keys(
    row, begin, inside, WORDS: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr
):
    """(WORDS, 32) the bits of |score|, which have the same order; NaN counts one step above inf."""
    source = tl.multiple_of(row + begin * 32, 16) + _elements(WORDS)
    score = tl.load(source, mask=inside[:, None], other=0.0)
    if BITS == 64:
        key = score.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        nan = tl.full([], 0x7FF0000000000001, tl.int64)
    elif BITS == 32:
        key = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        nan = tl.full([], 0x7F800001, tl.int32)
    else:
        key = score.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        nan = tl.full([], 0x7F81, tl.int32)
    key = tl.minimum(key, nan)
    if LARGEST:
        key = nan - key
    if BITS == 64:
        return key.to(tl.uint64)
    else:
        return key.to(tl.uint32)


@triton.jit
def _tile(tiles, words_in, WORDS: tl.constexpr, FREE: tl.constexpr):
    """What the tile of this program is.

    Returns:
        Its tensor, the first tile of that tensor, the first word of the tile in a row, (WORDS,) its
        words, (WORDS,) which of them exist, and (WORDS, 32) which elements are candidates.
    """
    line = tiles + tl.program_id(0).to(tl.int64) * 4
    tensor = tl.load(line)
    first = tl.load(line + 3)
    begin = tl.load(line + 1)
    length = tl.load(line + 2).to(tl.int32)
    own = tl.arange(0, WORDS)
    inside = own * 32 < length
    words = tl.load(words_in + begin + own, mask=inside, other=0)
    candidates = words
    if FREE:
        # Ones for the elements of the tensor in a word: all, or as many as are left.
        live = tl.minimum(tl.maximum(length - own * 32, 0), 32)
        ones = tl.where(live == 32, -1, (1 << (live & 31)) - 1)
        candidates = ~words & ones
    bits = (candidates[:, None] >> tl.arange(0, 32)[None, :]) & 1
    return tensor, first, begin, words, inside, bits != 0


@triton.jit
def _keys(
    row, begin, inside, seed_low, seed_high,
    WORDS: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """(WORDS, 32) the keys of the elements of a tile, by magnitude or at random."""
    if row is None:
        return _random_keys(begin, seed_low, seed_high, WORDS)
    else:
        return _magnitude_keys(row, begin, inside, WORDS, BITS, LARGEST)


@triton.jit
def _pack(bits):
    """Pack (WORDS, 32) of bool into (WORDS,) of int32."""
    return tl.sum(bits.to(tl.int32) << tl.arange(0, 32)[None, :], 1)


@triton.jit(
    do_not_specialize=["seed_low", "seed_high", "shift"],
    do_not_specialize_on_alignment=["bins", "words_in", "tiles", "thresholds"],
)
def histogram(
    bins,
    row,
    words_in,
    tiles,
    thresholds,
    seed_low,
    seed_high,
    shift,
    WORDS: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    FREE: tl.constexpr,
):
    """bins[t, d] += #{e of the tile: candidate, higher digits as the threshold's, digit d}.

    Args:
        bins: (T, 256) int64.
        shift: The bits below the digit.
    """
    tensor, _, begin, _, inside, candidates = _tile(tiles, words_in, WORDS, FREE)
    keys = _keys(row, begin, inside, seed_low, seed_high, WORDS, BITS, LARGEST)
    keys = keys >> shift.to(keys.dtype)
    # In two steps: in the first pass nothing is above the digit, and one shift by all bits of a
    # number is undefined.
    found = candidates & ((keys >> 8) == tl.load(thresholds + tensor).to(keys.dtype))
    digits = tl.where(found, (keys & 255).to(tl.int32), -1)
    # One axis in any order: keeping the order would go through shared memory.
    digits = tl.reshape(digits, [WORDS * 32], can_reorder=True)
    if tl.max(digits, 0) >= 0:
        counts = tl.histogram(digits, 256, mask=digits >= 0).to(tl.int64)
        place = bins + tensor * 256 + tl.arange(0, 256)
        tl.atomic_add(place, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["bins", "thresholds", "wanted", "left", "taken"])
def narrow(bins, thresholds, wanted, left, taken, FIRST: tl.constexpr):
    """Fix the next digit of a tensor's threshold: the first up to which enough keys are counted.

    A program owns one tensor, and leaves its bins empty for the next pass.

    Args:
        bins: (T, 256) int64, as counted by `histogram`.
        wanted: (T,) int64: how many to take in all (FIRST), or `left` of the pass before.
        left: (T,) int64: how many to take among the keys that share all digits of the threshold so
            far.
        taken: (T,) int64: how many will be taken in all; no more than there are candidates.
        FIRST: Whether this is the first pass.
    """
    tensor = tl.program_id(0).to(tl.int64)
    place = bins + tensor * 256 + tl.arange(0, 256)
    counts = tl.load(place)
    ends = tl.cumsum(counts, 0)
    number = tl.load(wanted + tensor)
    if FIRST:
        number = tl.minimum(number, tl.sum(counts, 0))
        tl.store(taken + tensor, number)
    below = ends < number
    digit = tl.sum(below.to(tl.int64), 0)
    tl.store(thresholds + tensor, tl.load(thresholds + tensor) * 256 + digit)
    tl.store(left + tensor, number - tl.max(tl.where(below, ends, 0), 0))
    tl.store(place, tl.zeros([256], tl.int64))


@triton.jit(
    do_not_specialize=["seed_low", "seed_high"],
    do_not_specialize_on_alignment=["ties_out", "words_in", "tiles", "thresholds"],
)
def ties(
    ties_out, row, words_in, tiles, thresholds, seed_low, seed_high, WORDS: tl.constexpr,
    BITS: tl.constexpr, LARGEST: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """ties_out[tile] = #{e of the tile: candidate, its key is the threshold}; (N,) int32."""
    tensor, _, begin, _, inside, candidates = _tile(tiles, words_in, WORDS, FREE)
    keys = _keys(row, begin, inside, seed_low, seed_high, WORDS, BITS, LARGEST)
    equal = candidates & (keys == tl.load(thresholds + tensor).to(keys.dtype))
    tl.store(ties_out + tl.program_id(0), tl.sum(tl.sum(equal.to(tl.int32), 1), 0))


@triton.jit(
    do_not_specialize=["seed_low", "seed_high"],
    do_not_specialize_on_alignment=["out", "words_in", "tiles", "thresholds", "left", "ends"],
)
def apply(
    out, row, words_in, tiles, thresholds, left, ends, seed_low, seed_high, WORDS: tl.constexpr,
    BITS: tl.constexpr, LARGEST: tl.constexpr, FREE: tl.constexpr, TOGGLE: tl.constexpr,
):  # fmt: skip
    """chosen[e] = candidate and (key < threshold, or equal to it and among the first left[t]).

    A program owns the words of its tile.

    Args:
        out: (W,) int32.
        left: (T,) int64: how many to take among the keys that are the threshold.
        ends: (N,) int64: the running total of the ties of the tiles.
        TOGGLE: Whether to write the words with the chosen bits inverted; else the chosen bits.
    """
    tile = tl.program_id(0)
    tensor, first, begin, words, inside, candidates = _tile(tiles, words_in, WORDS, FREE)
    keys = _keys(row, begin, inside, seed_low, seed_high, WORDS, BITS, LARGEST)
    threshold = tl.load(thresholds + tensor).to(keys.dtype)
    # The ties of the same tensor in the tiles before this one.
    base = tl.load(ends + tile - 1, mask=tile > 0, other=0)
    base -= tl.load(ends + first - 1, mask=first > 0, other=0)
    equal, rank = ranks(_pack(candidates & (keys == threshold)), base, WORDS)
    chosen = (equal != 0) & (rank < tl.load(left + tensor))
    result = _pack(chosen | (candidates & (keys < threshold)))
    if TOGGLE:
        result = words ^ result
    tl.store(out + begin + tl.arange(0, WORDS), result, mask=inside)


@triton.jit(
    do_not_specialize=["words_stride", "n_tiles", "n_tensors"],
    do_not_specialize_on_alignment=["counts", "words_in", "tiles"],
)
def count(counts, words_in, words_stride, tiles, n_tiles, n_tensors, WORDS: tl.constexpr):
    """counts[row, t] += the ones of a tile of the row; a program owns one tile of one row.

    Args:
        counts: (rows, n_tensors) int64.
        words_in: (rows, W) int32, with words_stride between rows.
        n_tiles: The tiles of a row.
    """
    line = tiles + (tl.program_id(0) % n_tiles).to(tl.int64) * 4
    row = (tl.program_id(0) // n_tiles).to(tl.int64)
    own = tl.arange(0, WORDS)
    inside = own * 32 < tl.load(line + 2)
    begin = words_in + row * words_stride + tl.load(line + 1)
    words = tl.load(begin + own, mask=inside, other=0)
    ones = tl.sum(count_ones(words), 0).to(tl.int64)
    tl.atomic_add(counts + row * n_tensors + tl.load(line), ones, sem="relaxed")


def launch_select(
    out: Tensor, words: Tensor, counts: Tensor, tiles: Tensor, order: Order, *,
    free: bool = False, toggle: bool = False,
) -> Tensor:  # fmt: skip
    """Launch the choice of candidates of every tensor.

    Args:
        out: (W,) int32 for the result; another tensor than `words`.
        words: (W,) int32 the packed mask from which the candidates follow.
        counts: (T,) int64 how many to choose of every tensor.
        tiles: (N, 4) int64, as of Segments.
        order: The order of choice.
        free: Whether the candidates are the zeros of `words`, not its ones.
        toggle: Whether `out` is `words` with the chosen bits inverted; else the chosen bits.

    Returns:
        How many were chosen of every tensor, (T,) int64.
    """
    if order.row is not None:
        _rows.addresses("row", [order.row])  # checks that it starts at a multiple of 16 bytes
    bits = 32 if order.row is None else KEY_BITS[order.row.dtype]
    n_tensors = counts.shape[0]
    n_tiles = tiles.shape[0]
    _rows.check_grid("select", max(n_tensors, n_tiles))

    # One buffer of zeros for everything that is (T,) or a multiple of it.
    buffer = torch.zeros(BINS + 3, n_tensors, dtype=torch.int64, device=out.device)
    bins = buffer[:BINS]
    thresholds, left, taken = buffer[BINS:]

    constants = {"WORDS": WORDS, "BITS": bits, "LARGEST": order.largest, "FREE": free}
    source = (order.row, words, tiles, thresholds)
    with on_device(out):
        for shift in range(bits - 8, -1, -8):
            is_first = shift == bits - 8
            histogram[(n_tiles,)](bins, *source, *order.seed, shift, **constants, num_warps=WARPS)
            wanted = counts if is_first else left
            narrow[(n_tensors,)](bins, thresholds, wanted, left, taken, FIRST=is_first, num_warps=1)
        tied = torch.empty(n_tiles, dtype=torch.int32, device=out.device)
        ties[(n_tiles,)](tied, *source, *order.seed, **constants, num_warps=WARPS)
        ends = tied.cumsum(0)
        apply[(n_tiles,)](
            out, *source, left, ends, *order.seed, **constants, TOGGLE=toggle, num_warps=WARPS
        )
    return taken


def launch_count(counts: Tensor, words: Tensor, tiles: Tensor) -> None:
    """Launch the count of ones of every tensor.

    Args:
        counts: (.., T) int64 for the result.
        words: (.., W) int32.
        tiles: (N, 4) int64, as of Segments.
    """
    n_tiles = tiles.shape[0]
    n_tensors = counts.shape[-1]
    n_rows = counts.numel() // n_tensors
    _rows.check_grid("count_per_tensor", n_rows * n_tiles)
    counts.zero_()
    with on_device(words):
        count[(n_rows * n_tiles,)](
            counts, words, words.stride(0), tiles, n_tiles, n_tensors, WORDS=WORDS, num_warps=1
        )
