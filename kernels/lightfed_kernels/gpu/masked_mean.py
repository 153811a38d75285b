"""One launch for the means of all receivers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels.gpu.masks import TYPES, on_device

# Mask words of a tile: 1024 elements, 8 a thread.
WORDS = 32
WARPS = 4

# Of tiles that receivers share: receivers at a time, each with a warp.
GROUP = 16

# Bytes of a row in such a tile, by the size of an element. Eight elements a thread share the
# addresses and the mask word of a neighbour; of float64 they would take too many registers.
ROW_BYTES = {2: 512, 4: 1024, 8: 512}

# Bytes that the tiles of all rows take at most: two programs fill an L1 cache of 256 KiB.
ROOM = 120 * 2**10

# Bytes of a cache line, which the mask words of a row in a tile take.
LINE = 128


@triton.jit(
    do_not_specialize=["out_stride", "n_words", "n_receivers"],
    do_not_specialize_on_alignment=["table", "weights"],
)
def masked_mean(
    table,
    weights,
    out,
    out_stride,
    n_words,
    n_receivers,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    MASKED: tl.constexpr,
    COUNTED: tl.constexpr,
    KEPT: tl.constexpr,
):
    """out[r, e] = c_r[e] ? sum_k w_k m_k[e] x_k[e] / d : 0,  d = sum_k w_k m_k[e] or sum_k w_k.

    A program owns WORDS * 32 elements of one receiver. Receivers are fastest, so that programs
    that run together find the tiles of common senders in the L2 cache.

    table: int64, first[0 .. R], then the addresses (row, mask) of every neighbour, then those of
        the receivers' masks.
    weights: None where all weigh the same.
    MASKED: whether there are masks; COUNTED: whether d counts those that cover an element; KEPT:
        whether there are masks of receivers.
    """
    receiver = tl.program_id(0) % n_receivers
    tile = tl.program_id(0) // n_receivers
    word = tile.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < n_words
    bit = 1 << tl.arange(0, 32)
    elements = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    begin = tl.load(table + receiver)
    end = tl.load(table + receiver + 1)
    edges = table + n_receivers + 1
    # Sum and count in one tensor: as two, the compiler gives them layouts of their own, loads
    # every mask word twice and exchanges through shared memory.
    if COUNTED:
        both = tl.zeros([WORDS, 32, 2], ACC)
    else:
        total = tl.zeros([WORDS, 32], ACC)
        count = tl.zeros([], ACC)
    # Four rows are under way at once, in registers.
    for e in tl.range(begin, end, num_stages=1, loop_unroll_factor=4):
        row = tl.multiple_of(tl.load(edges + 2 * e).to(tl.pointer_type(DTYPE)), 16)
        value = tl.load(row + elements, mask=inside[:, None], other=0.0).to(ACC)
        weight = 1.0
        if weights is not None:
            weight = tl.load(weights + e)
            value = value * weight
        if MASKED:
            mask = tl.load(edges + 2 * e + 1).to(tl.pointer_type(tl.int32))
            words = tl.load(mask + word, mask=inside, other=0)
            covered = (words[:, None] & bit[None, :]) != 0
        if COUNTED:
            share = tl.full([WORDS, 32], 1.0, ACC) * weight
            both = tl.where(covered[:, :, None], both + tl.join(value, share), both)
        elif MASKED:
            total = tl.where(covered, total + value, total)
        else:
            total += value
        if not COUNTED:
            count += weight
    if COUNTED:
        total, count = tl.split(both)
    mean = divided(total, tl.broadcast_to(count, [WORDS, 32]), ACC)
    if KEPT:
        stay = tl.load(edges + 2 * tl.load(table + n_receivers) + receiver)
        words = tl.load(stay.to(tl.pointer_type(tl.int32)) + word, mask=inside, other=0)
        mean = tl.where((words[:, None] & bit[None, :]) != 0, mean, 0.0)
    target = tl.multiple_of(out + receiver.to(tl.int64) * out_stride, 16)
    tl.store(target + elements, mean.to(DTYPE), mask=inside[:, None])


@triton.jit
def divided(total, count, ACC: tl.constexpr):
    """Sums over counts; where the count is 0, so is the sum, and stays."""
    count = tl.where(count > 0, count, 1.0)
    # `/` is an approximation in float32.
    return total / count if ACC == tl.float64 else tl.div_rn(total, count)


@triton.jit(
    do_not_specialize=["out_stride", "n_words", "n_receivers", "most"],
    do_not_specialize_on_alignment=["table"],
)
def mean_tile(
    table,
    out,
    out_stride,
    n_words,
    n_receivers,
    most,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    MASKED: tl.constexpr,
    COUNTED: tl.constexpr,
    KEPT: tl.constexpr,
):
    """`masked_mean` without weights: the same sums in the same order.

    A program owns WORDS * 32 elements of all receivers and takes GROUP of them at a time, one a
    warp. The tiles of all senders stay in the L1 cache of its multiprocessor.

    table, MASKED, COUNTED, KEPT: as there; 2 * most more numbers follow the table.
    most: the length of the longest list.
    """
    # The last tile begins where it is full: what two programs write is the same.
    first = tl.minimum(tl.program_id(0).to(tl.int64) * WORDS, n_words - WORDS)
    word = (first + tl.arange(0, WORDS))[None, :]
    bit = (1 << tl.arange(0, 32))[None, None, :]
    elements = word[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    one = tl.full([GROUP, WORDS, 32], 1.0, ACC)
    edges = table + n_receivers + 1
    for group in tl.range(0, n_receivers, GROUP, num_stages=1):
        receiver = group + tl.arange(0, GROUP)
        there = receiver < n_receivers
        begin = tl.load(table + receiver, mask=there, other=0)
        degree = (tl.load(table + receiver + 1, mask=there, other=0) - begin).to(tl.int32)
        own = edges + 2 * begin
        if COUNTED:
            both = tl.zeros([GROUP, WORDS, 32, 2], ACC)
        else:
            both = tl.zeros([GROUP, WORDS, 32], ACC)
        # Unrolled, a program would take registers of a second one on its multiprocessor.
        for k in tl.range(0, most, num_stages=1):
            # A shorter list reads on in the table, and nothing where that points to.
            taken = (k < degree)[:, None]
            row = tl.multiple_of(tl.load(own + 2 * k).to(tl.pointer_type(DTYPE)), [16])
            value = tl.load(row[:, None, None] + elements, mask=taken[:, :, None], other=0.0)
            value = value.to(ACC)
            if MASKED:
                mask = tl.load(own + 2 * k + 1).to(tl.pointer_type(tl.int32))
                words = tl.load(mask[:, None] + word, mask=taken, other=0)
                covered = (words[:, :, None] & bit) != 0
            if COUNTED:
                both = tl.where(covered[:, :, :, None], both + tl.join(value, one), both)
            elif MASKED:
                both = tl.where(covered, both + value, both)
            else:
                both += value
        if COUNTED:
            total, count = tl.split(both)
        else:
            total, count = both, one * degree.to(ACC)[:, None, None]
        mean = divided(total, count, ACC)
        if KEPT:
            kept = edges + 2 * tl.load(table + n_receivers) + receiver
            kept = tl.load(kept, mask=there, other=0).to(tl.pointer_type(tl.int32))
            words = tl.load(kept[:, None] + word, mask=there[:, None], other=0)
            mean = tl.where((words[:, :, None] & bit) != 0, mean, 0.0)
        target = tl.multiple_of(out + receiver.to(tl.int64) * out_stride, [16])
        tl.store(target[:, None, None] + elements, mean.to(DTYPE), mask=there[:, None, None])


def shared(lengths: np.ndarray, chosen: np.ndarray, element_size: int) -> bool:
    """Whether `mean_tile` is to be launched: sizes alone decide, not what memory is free.

    It is if receivers read twice as many rows as there are rows to read and to write, if the tiles
    of those to read, with a line of cache for their words, have room, and if lists are alike.

    Args:
        lengths: (R,) of the receivers' lists.
        chosen: the senders of all lists.
        element_size: bytes.
    """
    heard = np.count_nonzero(np.bincount(chosen))
    tiles_fit = heard * (ROW_BYTES[element_size] + LINE) <= ROOM
    lists_alike = lengths.max() * len(lengths) <= 2 * len(chosen)
    read_often = len(chosen) >= 2 * (heard + len(lengths))
    return bool(tiles_fit and lists_alike and read_often)


def launch(
    out: Tensor,
    row_table: np.ndarray,
    masks: Sequence[Tensor],
    receivers: Sequence[Tensor],
    first: Tensor,
    index: Tensor,
    weights: Tensor | None,
    over_neighbours: bool,
    *,
    words: int = WORDS,
    into: Tensor | None = None,
) -> None:
    """Args as the operator takes them; `row_table` holds the addresses of the rows, on the host.

    With `into`, the rows, one block of columns as wide as `out` is written after the other.
    """
    chosen = index.numpy()
    edges = np.zeros((len(chosen), 2), np.int64)
    edges[:, 0] = row_table[chosen]
    if masks:
        edges[:, 1] = _rows.addresses("masks", masks, multiple=4)[chosen]
    kept = _rows.addresses("receivers", receivers, multiple=4)
    size, width = (out if into is None else into).shape[1], out.shape[1]
    # A table for each block, all of them in one copy.
    further = np.array([width * out.element_size(), width // 8 if masks else 0])
    lengths = np.diff(first.numpy())
    most = 0
    if weights is None and shared(lengths, chosen, out.element_size()):
        most = int(lengths.max())
    steps = [first.numpy() * 0, np.tile(further, len(chosen)), np.full(len(kept), width // 8)]
    beyond = np.zeros(2 * most, np.int64)
    blocks = np.arange(-(-size // width))[:, None] * np.concatenate([*steps, beyond])
    blocks += np.concatenate([first.numpy(), edges.ravel(), kept, beyond])
    tables = _rows.resident(blocks, out.device).view(blocks.shape)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    shares = None
    if weights is not None:
        shares = _rows.to_device(weights.to(wide).numpy(), out.device)
    _rows.check_grid("masked_mean", -(-width // (32 * words)) * len(out))
    types: dict[str, Any] = {
        "DTYPE": TYPES[out.dtype], "ACC": TYPES[wide], "MASKED": bool(masks),
        "COUNTED": bool(masks) and not over_neighbours, "KEPT": bool(receivers),
    }  # fmt: skip
    tile = ROW_BYTES[out.element_size()] // out.element_size() // 32
    with on_device(out):
        for table, begin in zip(tables, range(0, size, width), strict=True):
            n_words = min(width, size - begin) // 32
            sizes = out.stride(0), n_words, len(out)
            if most and n_words >= tile:
                mean_tile[(-(-n_words // tile),)](
                    table, out, *sizes, most, GROUP=GROUP, WORDS=tile, num_warps=GROUP, **types
                )
            else:
                masked_mean[(-(-n_words // words) * len(out),)](
                    table, shares, out, *sizes, WORDS=words, num_warps=WARPS, **types
                )
            if into is not None:
                into[:, begin : begin + width].copy_(out[:, : size - begin])
