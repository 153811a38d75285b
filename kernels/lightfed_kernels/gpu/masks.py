"""Packed masks and compressed rows.

Everywhere a tile is a block of WORDS mask words by 32 elements, so a word is loaded once and its
elements are moved 16 bytes at a time.
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
    """Kernels start on the current device, which need not be the tensors'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def count_ones(v):
    """Bits of int32 that are 1: sums of pairs, then of fours, bytes, and the four bytes."""
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    v = v + (v >> 8)
    return (v + (v >> 16)) & 0x3F


@triton.jit
def tile_words(tile, n_words, WORDS: tl.constexpr):
    """Words of a tile (WORDS,), their elements (WORDS, 32), and which words exist."""
    word = tile.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    elements = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    return word, elements, word < n_words


@triton.jit
def ranks(words, base, WORDS: tl.constexpr):
    """(WORDS, 32): bits of a tile, and how many ones precede each; base of them in tiles before."""
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
    """words[w] = sum_i 2^i mask[32 w + i]; a program owns WORDS words of a row."""
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
    """mask[32 w + i] = bit i of words[w]; a program owns WORDS * 32 elements of a row."""
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
    """counts[t] = ones in tile t of a row; a program owns TILES tiles."""
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

    ends[t]: ones up to and including tile t. No element goes beyond nnz, whatever the mask says.
    """
    tile = tl.program_id(0)
    word, elements, inside = tile_words(tile, n_words, WORDS)
    words = tl.load(words_in + word, mask=inside, other=0)
    base = tl.load(ends + tile - 1, mask=tile > 0, other=0)
    bits, rank = ranks(words, base, WORDS)
    found = tl.load(tl.multiple_of(source, 16) + elements, mask=inside[:, None], other=0.0)
    tl.store(values + rank, found, mask=(bits != 0) & (rank < nnz))


@triton.jit(
    do_not_specialize=["n_words", "nnz"],
    do_not_specialize_on_alignment=["values", "words_in", "ends"],
)
def expand(target, values, words_in, ends, n_words, nnz, WORDS: tl.constexpr):
    """target[e] = e is covered ? values[rank(e)] : 0; a program owns WORDS * 32 elements."""
    tile = tl.program_id(0)
    word, elements, inside = tile_words(tile, n_words, WORDS)
    words = tl.load(words_in + word, mask=inside, other=0)
    base = tl.load(ends + tile - 1, mask=tile > 0, other=0)
    bits, rank = ranks(words, base, WORDS)
    found = tl.load(values + rank, mask=(bits != 0) & (rank < nnz), other=0.0)
    tl.store(tl.multiple_of(target, 16) + elements, found, mask=inside[:, None])


@triton.jit(
    do_not_specialize=["rows_stride", "words_stride", "n_words", "n_tiles"],
    do_not_specialize_on_alignment=["words_in"],
)
def apply(rows, words_in, rows_stride, words_stride, n_words, n_tiles, WORDS: tl.constexpr):
    """rows[e] = e is covered ? rows[e] : 0; a program owns WORDS * 32 elements of a row."""
    row = (tl.program_id(0) // n_tiles).to(tl.int64)
    word, elements, inside = tile_words(tl.program_id(0) % n_tiles, n_words, WORDS)
    words = tl.load(words_in + row * words_stride + word, mask=inside, other=0)
    bits = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
    target = tl.multiple_of(rows + row * rows_stride, 16) + elements
    found = tl.load(target, mask=inside[:, None], other=0.0)
    tl.store(target, tl.where(bits != 0, found, 0.0), mask=inside[:, None])


def launch_pack(words: Tensor, mask: Tensor) -> None:
    """(R, W) int32 from (R, 32 W) bool."""
    if mask.data_ptr() % 16 or (mask.shape[0] > 1 and mask.stride(0) % 16):
        mask = mask.clone(memory_format=torch.contiguous_format)
    n_tiles = -(-words.shape[1] // BYTE_WORDS)
    _start(pack, words.shape[0] * n_tiles, words, mask.view(torch.int8),
           words.stride(0), mask.stride(0), words.shape[1], n_tiles, WORDS=BYTE_WORDS)  # fmt: skip


def launch_unpack(mask: Tensor, words: Tensor) -> None:
    n_tiles = -(-words.shape[1] // BYTE_WORDS)
    _start(unpack, words.shape[0] * n_tiles, mask.view(torch.int8), words,
           mask.stride(0), words.stride(0), words.shape[1], n_tiles, WORDS=BYTE_WORDS)  # fmt: skip


def tile_counts(words: Tensor) -> Tensor:
    """(R, W) -> (R, tiles) int32: ones of every tile."""
    n_tiles = -(-words.shape[1] // WORDS)
    n_programs = -(-n_tiles // TILES)
    counts = torch.empty(words.shape[0], n_tiles, dtype=torch.int32, device=words.device)
    _start(count, words.shape[0] * n_programs, counts, words, words.stride(0), words.shape[1],
           n_tiles, n_programs, TILES=TILES, WORDS=WORDS)  # fmt: skip
    return counts


def launch_compress(values: Tensor, row: Tensor, words: Tensor) -> None:
    _rows.addresses("row", [row])
    ends = tile_counts(words[None])[0].cumsum(0)
    _start(compress, len(ends), values, row, words, ends, len(words), len(values), WORDS=WORDS)


def launch_expand(out: Tensor, values: Tensor, words: Tensor) -> None:
    _rows.addresses("out", [out])
    ends = tile_counts(words[None])[0].cumsum(0)
    _start(expand, len(ends), out, values, words, ends, len(words), len(values), WORDS=WORDS)


def launch_apply(rows: Tensor, words: Tensor) -> None:
    """(R, P) with (R, W), or one mask (1, W) for all."""
    _rows.addresses("rows", [rows])
    n_tiles = -(-words.shape[1] // WORDS)
    stride = words.stride(0) if words.shape[0] > 1 else 0
    _start(apply, rows.shape[0] * n_tiles, rows, words, rows.stride(0), stride,
           words.shape[1], n_tiles, WORDS=WORDS)  # fmt: skip


def _start(
    kernel: triton.JITFunction, programs: int, first: Tensor, *args: Tensor | int, **constants: int
) -> None:
    _rows.check_grid(kernel.__name__, programs)
    with on_device(first):
        kernel[(programs,)](first, *args, **constants, num_warps=WARPS)
