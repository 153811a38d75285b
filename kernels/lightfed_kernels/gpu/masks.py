"""Packed masks and compressed rows.

In all kernels a tile is a block of WORDS mask words by 32 elements, so that a word is loaded once
and its elements are moved 16 bytes at a time.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightfed_kernels import _rows

# Mask words of a tile: 1024 elements.
WORDS = 32
# Mask words of a tile of booleans: a thread loads 16 of them, 16 bytes, at once.
BYTE_WORDS = 64
# Tiles that a program counts.
TILES = 32
WARPS = 4

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64}
# The types of the arithmetic.
WIDE = {**TYPES, torch.bfloat16: tl.float32}


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make a tensor's device the current one for a block: kernels start on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def count_ones(v):
    """The number of ones in every int32: the sums of pairs, then of fours, of bytes, of words."""
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    v = v + (v >> 8)
    return (v + (v >> 16)) & 0x3F


@triton.jit
def tile_words(tile, n_words, WORDS: tl.constexpr):
    """The positions of a tile in a row.

    Returns:
        (WORDS,) int64 of its words, (WORDS, 32) int64 of their elements, and (WORDS,) which of the
        words exist.
    """
    word = tile.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    elements = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    return word, elements, word < n_words


@triton.jit
def ranks(words, base, WORDS: tl.constexpr):
    """The bits of a tile, and how many ones precede each.

    Args:
        words: (WORDS,) the words of the tile.
        base: The number of ones in the tiles before it.

    Returns:
        Both as (WORDS, 32).
    """
    lanes = tl.arange(0, 32)
    ones = count_ones(words)
    before = base + (tl.cumsum(ones, 0) - ones)
    below = ~(tl.full([32], -1, tl.int32) << lanes)
    rank = before[:, None] + count_ones(words[:, None] & below[None, :])
    return (words[:, None] >> lanes[None, :]) & 1, rank


@triton.jit(
    do_not_specialize=["words_stride", "mask_stride", "n_words", "n_tiles"],
    do_not_specialize_on_alignment=["words_out"],
)
def pack(words_out, mask, words_stride, mask_stride, n_words, n_tiles, WORDS: tl.constexpr):
    """words[w] = sum_i 2^i mask[32 w + i]; a program owns WORDS words of a row.

    Args:
        words_out: (rows, n_words) int32, with words_stride between rows.
        mask: (rows, 32 n_words) int8, with mask_stride between rows.
        n_tiles: The number of programs for a row.
    """
    row = (tl.program_id(0) // n_tiles).to(tl.int64)
    word, elements, inside = tile_words(tl.program_id(0) % n_tiles, n_words, WORDS)
    source = tl.multiple_of(mask + row * mask_stride, 16)
    bits = tl.load(source + elements, mask=inside[:, None], other=0)
    bits = (bits != 0).to(tl.int32) << tl.arange(0, 32)[None, :]
    tl.store(words_out + row * words_stride + word, tl.sum(bits, 1), mask=inside)


@triton.jit(
    do_not_specialize=["mask_stride", "words_stride", "n_words", "n_tiles"],
    do_not_specialize_on_alignment=["words_in"],
)
def unpack(mask, words_in, mask_stride, words_stride, n_words, n_tiles, WORDS: tl.constexpr):
    """mask[32 w + i] = bit i of words[w]; a program owns WORDS * 32 elements of a row.

    The arguments are as those of `pack`.
    """
    row = (tl.program_id(0) // n_tiles).to(tl.int64)
    word, elements, inside = tile_words(tl.program_id(0) % n_tiles, n_words, WORDS)
    words = tl.load(words_in + row * words_stride + word, mask=inside, other=0)
    bits = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
    target = tl.multiple_of(mask + row * mask_stride, 16)
    tl.store(target + elements, bits.to(tl.int8), mask=inside[:, None])


@triton.jit(
    do_not_specialize=["words_stride", "n_words", "n_tiles", "n_programs"],
    do_not_specialize_on_alignment=["counts", "words_in"],
)
def count(
    counts,
    words_in,
    words_stride,
    n_words,
    n_tiles,
    n_programs,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """counts[t] = the ones in tile t of a row; a program owns TILES tiles of a row.

    Args:
        counts: (rows, n_tiles) int32.
        words_in: (rows, n_words) int32, with words_stride between rows.
        n_programs: The number of programs for a row.
    """
    row = (tl.program_id(0) // n_programs).to(tl.int64)
    tile = (tl.program_id(0) % n_programs).to(tl.int64) * TILES + tl.arange(0, TILES)
    word = tile[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.load(words_in + row * words_stride + word, mask=word < n_words, other=0)
    tl.store(counts + row * n_tiles + tile, tl.sum(count_ones(words), 1), mask=tile < n_tiles)


@triton.jit(
    do_not_specialize=["n_words", "nnz"],
    do_not_specialize_on_alignment=["values", "words_in", "ends"],
)
def compress(values, source, words_in, ends, n_words, nnz, WORDS: tl.constexpr):
    """values[rank(e)] = source[e] where e is covered; a program reads WORDS * 32 elements.

    Args:
        values: (nnz,) what is written. Nothing goes beyond nnz, whatever the mask says.
        source: (32 n_words,) the row.
        words_in: (n_words,) the mask.
        ends: (tiles,) the ones up to and including every tile.
    """
    tile = tl.program_id(0)
    word, elements, inside = tile_words(tile, n_words, WORDS)
    words = tl.load(words_in + word, mask=inside, other=0)
    base = tl.load(ends + tile - 1, mask=tile > 0, other=0)
    bits, rank = ranks(words, base, WORDS)
    value = tl.load(tl.multiple_of(source, 16) + elements, mask=inside[:, None], other=0.0)
    tl.store(values + rank, value, mask=(bits != 0) & (rank < nnz))


@triton.jit(
    do_not_specialize=["n_words", "nnz"],
    do_not_specialize_on_alignment=["values", "words_in", "ends"],
)
def expand(target, values, words_in, ends, n_words, nnz, WORDS: tl.constexpr):
    """target[e] = e is covered ? values[rank(e)] : 0; a program owns WORDS * 32 elements.

    The arguments are as those of `compress`.
    """
    tile = tl.program_id(0)
    word, elements, inside = tile_words(tile, n_words, WORDS)
    words = tl.load(words_in + word, mask=inside, other=0)
    base = tl.load(ends + tile - 1, mask=tile > 0, other=0)
    bits, rank = ranks(words, base, WORDS)
    value = tl.load(values + rank, mask=(bits != 0) & (rank < nnz), other=0.0)
    tl.store(tl.multiple_of(target, 16) + elements, value, mask=inside[:, None])


@triton.jit(
    do_not_specialize=["rows_stride", "words_stride", "n_words", "n_tiles"],
    do_not_specialize_on_alignment=["words_in"],
)
def apply(rows, words_in, rows_stride, words_stride, n_words, n_tiles, WORDS: tl.constexpr):
    """rows[e] = e is covered ? rows[e] : 0; a program owns WORDS * 32 elements of a row.

    Args:
        rows: (R, 32 n_words), with rows_stride between rows.
        words_in: (R, n_words), with words_stride between masks; 0 if all rows have the same mask.
        n_tiles: The number of programs for a row.
    """
    row = (tl.program_id(0) // n_tiles).to(tl.int64)
    word, elements, inside = tile_words(tl.program_id(0) % n_tiles, n_words, WORDS)
    words = tl.load(words_in + row * words_stride + word, mask=inside, other=0)
    bits = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
    target = tl.multiple_of(rows + row * rows_stride, 16) + elements
    value = tl.load(target, mask=inside[:, None], other=0.0)
    tl.store(target, tl.where(bits != 0, value, 0.0), mask=inside[:, None])


def launch_pack(words: Tensor, mask: Tensor) -> None:
    """Pack (R, 32 W) bool into (R, W) int32."""
    # The kernel reads 16 bytes at a time.
    is_aligned = mask.data_ptr() % 16 == 0 and (mask.shape[0] == 1 or mask.stride(0) % 16 == 0)
    if not is_aligned:
        mask = mask.clone(memory_format=torch.contiguous_format)
    n_tiles = -(-words.shape[1] // BYTE_WORDS)
    _start(pack, words.shape[0] * n_tiles, words, mask.view(torch.int8),
           words.stride(0), mask.stride(0), words.shape[1], n_tiles, WORDS=BYTE_WORDS)  # fmt: skip


def launch_unpack(mask: Tensor, words: Tensor) -> None:
    """Unpack (R, W) int32 into (R, 32 W) bool."""
    n_tiles = -(-words.shape[1] // BYTE_WORDS)
    _start(unpack, words.shape[0] * n_tiles, mask.view(torch.int8), words,
           mask.stride(0), words.stride(0), words.shape[1], n_tiles, WORDS=BYTE_WORDS)  # fmt: skip


def tile_counts(words: Tensor) -> Tensor:
    """Return the ones of every tile of (R, W) int32, as (R, tiles) int32."""
    n_tiles = -(-words.shape[1] // WORDS)
    n_programs = -(-n_tiles // TILES)
    counts = torch.empty(words.shape[0], n_tiles, dtype=torch.int32, device=words.device)
    _start(count, words.shape[0] * n_programs, counts, words, words.stride(0), words.shape[1],
           n_tiles, n_programs, TILES=TILES, WORDS=WORDS)  # fmt: skip
    return counts


def launch_compress(values: Tensor, row: Tensor, words: Tensor) -> None:
    """Write the covered values (nnz,) of a row (P,) whose mask is (P / 32,) int32."""
    _rows.addresses("row", [row])  # checks that it starts at a multiple of 16 bytes
    ends = tile_counts(words[None])[0].cumsum(0)
    _start(compress, len(ends), values, row, words, ends, len(words), len(values), WORDS=WORDS)


def launch_expand(out: Tensor, values: Tensor, words: Tensor) -> None:
    """Write a row (P,) from its covered values (nnz,) and its mask (P / 32,) int32."""
    _rows.addresses("out", [out])  # checks that it starts at a multiple of 16 bytes
    ends = tile_counts(words[None])[0].cumsum(0)
    _start(expand, len(ends), out, values, words, ends, len(words), len(values), WORDS=WORDS)


def launch_apply(rows: Tensor, words: Tensor) -> None:
    """Set to 0 what a mask does not cover of rows (R, P).

    Args:
        rows: The rows.
        words: (R, P / 32) int32, or (1, P / 32), one mask for all rows.
    """
    _rows.addresses("rows", [rows])  # checks that they start at multiples of 16 bytes
    n_tiles = -(-words.shape[1] // WORDS)
    stride = words.stride(0) if words.shape[0] > 1 else 0
    _start(apply, rows.shape[0] * n_tiles, rows, words, rows.stride(0), stride,
           words.shape[1], n_tiles, WORDS=WORDS)  # fmt: skip


def _start(
    kernel: triton.JITFunction, programs: int, first: Tensor, *args: Tensor | int, **constants: int
) -> None:
    """Launch a kernel on the device of its first argument."""
    _rows.check_grid(kernel.__name__, programs)
    with on_device(first):
        kernel[(programs,)](first, *args, **constants, num_warps=WARPS)
