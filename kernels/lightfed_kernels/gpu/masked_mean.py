"""The kernels of `masked_mean`: one launch for the means of all receivers.

There are two, with the same sums in the same order. `masked_mean` has a program for every receiver
and tile of columns. `mean_tile` has a program for every tile, which goes over all receivers: the
rows are read from memory once, and from the L1 cache after that.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
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

# Receivers that a program of `mean_tile` has at a time, each with a warp.
GROUP = 16

# Bytes of a row in a tile of `mean_tile`. With 1,024 of float32, eight elements a thread shared the
# addresses and the mask word of a neighbor, but the tiles of 100 rows of two programs, 230 KB, did
# not stay in L1: an H200 took as long as L2 needs to send every row to every receiver.
ROW_BYTES = 512

# The most bytes that the tiles of all rows may take: two programs share an L1 cache of 256 KiB.
ROOM = 96 * 2**10

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

    A program owns WORDS * 32 elements of one receiver. Consecutive programs have the same columns
    and different receivers, so that programs that run together find the tiles of common senders in
    the L2 cache.

    Args:
        table: int64: first[0 .. R], then the addresses (row, mask) of every neighbor, then the
            addresses of the receivers' masks.
        weights: (neighbors,) in the type ACC; None if all weigh the same.
        out: (R, 32 n_words), with out_stride between rows.
        n_words: The mask words of a row.
        n_receivers: R.
        DTYPE: The type of the rows.
        ACC: The type of the sums.
        MASKED: Whether senders have masks.
        COUNTED: Whether d counts only those that cover an element.
        KEPT: Whether receivers have masks.
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
    """The sums divided by the counts. Where a count is 0, so is the sum, and it stays 0."""
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

    A program owns WORDS * 32 elements of all receivers. It takes GROUP receivers at a time, one a
    warp. The tiles of all senders stay in the L1 cache of its multiprocessor.

    The arguments are those of `masked_mean`, except for two.

    Args:
        table: As there, and 2 * most numbers more, which a shorter list may read.
        most: The length of the longest list.
    """
    # The last tile begins so that it is full. Where two programs write, they write the same.
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

        # Four rows are under way at once, and two programs still fit on a multiprocessor.
        for k in tl.range(0, most, num_stages=1, loop_unroll_factor=4):
            # A shorter list reads on in the table, but nothing from where that points to.
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
            total = both
            count = one * degree.to(ACC)[:, None, None]
        mean = divided(total, count, ACC)
        if KEPT:
            kept = edges + 2 * tl.load(table + n_receivers) + receiver
            kept = tl.load(kept, mask=there, other=0).to(tl.pointer_type(tl.int32))
            words = tl.load(kept[:, None] + word, mask=there[:, None], other=0)
            mean = tl.where((words[:, :, None] & bit) != 0, mean, 0.0)
        target = tl.multiple_of(out + receiver.to(tl.int64) * out_stride, [16])
        tl.store(target[:, None, None] + elements, mean.to(DTYPE), mask=there[:, None, None])


def shared(lengths: np.ndarray, chosen: np.ndarray) -> bool:
    """Whether to launch `mean_tile` instead of `masked_mean`.

    It pays if receivers read at least twice as many rows as there are rows to read and to write, if
    the tiles of the rows to read, with a cache line each for their mask words, have room, and if
    the lists are alike in length. Sizes alone decide, not what memory is free, so that the choice
    does not change from call to call.

    Args:
        lengths: (R,) the lengths of the receivers' lists.
        chosen: The senders of all lists.
    """
    rows_to_read = np.count_nonzero(np.bincount(chosen))
    tiles_fit = rows_to_read * (ROW_BYTES + LINE) <= ROOM
    lists_are_alike = lengths.max() * len(lengths) <= 2 * len(chosen)
    are_read_often = len(chosen) >= 2 * (rows_to_read + len(lengths))
    return bool(tiles_fit and lists_are_alike and are_read_often)


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
    """Launch the means of all receivers; most arguments are those of the operator.

    Args:
        out: (R, columns) for the means, or for those of a block of columns.
        row_table: The addresses of the rows, on the host.
        masks: The senders' masks.
        receivers: The receivers' masks.
        first: (R + 1,) where the list of every receiver begins.
        index: The senders of all lists.
        weights: Their weights; None if all weigh the same.
        over_neighbours: Whether to divide by all neighbors.
        words: The mask words of a tile of `masked_mean`.
        into: (R, P) to which the means are written, one block of columns as wide as `out` after the
            other; None to write `out` alone.
    """
    all_columns = (out if into is None else into).shape[1]
    width = out.shape[1]
    plan = _plan if index.nbytes <= _KEPT_BYTES else _plan.__wrapped__
    tables, most = plan(
        first.numpy().tobytes(),
        index.numpy().tobytes(),
        row_table.tobytes(),
        _rows.addresses("masks", masks, multiple=4).tobytes(),
        _rows.addresses("receivers", receivers, multiple=4).tobytes(),
        share=shared if weights is None else None,
        width=width,
        num_blocks=-(-all_columns // width),
        element_size=out.element_size(),
        device=out.device,
    )
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    wide_weights = None
    if weights is not None:
        wide_weights = _rows.to_device(weights.to(wide).numpy(), out.device)

    _rows.check_grid("masked_mean", -(-width // (32 * words)) * len(out))
    constants: dict[str, Any] = {
        "DTYPE": TYPES[out.dtype],
        "ACC": TYPES[wide],
        "MASKED": bool(masks),
        "COUNTED": bool(masks) and not over_neighbours,
        "KEPT": bool(receivers),
    }
    words_of_shared_tile = ROW_BYTES // out.element_size() // 32
    with on_device(out):
        for table, begin in zip(tables, range(0, all_columns, width), strict=True):
            n_words = min(width, all_columns - begin) // 32
            sizes = out.stride(0), n_words, len(out)
            if most and n_words >= words_of_shared_tile:
                mean_tile[(-(-n_words // words_of_shared_tile),)](
                    table, out, *sizes, most, GROUP=GROUP, WORDS=words_of_shared_tile,
                    num_warps=GROUP, **constants,
                )  # fmt: skip
            else:
                masked_mean[(-(-n_words // words) * len(out),)](
                    table, wide_weights, out, *sizes, WORDS=words, num_warps=WARPS, **constants
                )
            if into is not None:
                into[:, begin : begin + width].copy_(out[:, : all_columns - begin])


# Lists of more bytes are those of many receivers, whose neighbors change from round to round.
_KEPT_BYTES = 2**16


@lru_cache(maxsize=64)
def _plan(
    first: bytes,
    index: bytes,
    rows: bytes,
    masks: bytes,
    receivers: bytes,
    *,
    share: Callable[[np.ndarray, np.ndarray], bool] | None,
    width: int,
    num_blocks: int,
    element_size: int,
    device: torch.device,
) -> tuple[Tensor, int]:
    """Return what a launch reads, and whether receivers share tiles.

    Rows mostly stay where they are, and then the host does nothing here. Arrays come as bytes of
    int64, which are compared faster than they are made.

    Args:
        first: Where the list of every receiver begins.
        index: The senders of all lists.
        rows: The addresses of the rows.
        masks: The addresses of the senders' masks; none without.
        receivers: The addresses of the receivers' masks; none without.
        share: Says whether receivers share tiles; None if they may not.
        width: The columns of a block.
        num_blocks: The number of blocks.
        element_size: The bytes of an element.
        device: The device of the rows.

    Returns:
        The kernels' `table` of every block of columns, one a line, on the device, in one copy: from
        block to block only the addresses move on. And the length of the longest list, if receivers
        share tiles; else 0.
    """
    begins, chosen, row_table, mask_table, receiver_masks = (
        np.frombuffer(array, np.int64) for array in (first, index, rows, masks, receivers)
    )
    lengths = np.diff(begins)
    most = 0
    if share is not None and share(lengths, chosen):
        most = int(lengths.max())

    edges = np.zeros((len(chosen), 2), np.int64)  # the addresses (row, mask) of every neighbor
    edges[:, 0] = row_table[chosen]
    if len(mask_table):
        edges[:, 1] = mask_table[chosen]
    beyond = np.zeros(2 * most, np.int64)

    # How many bytes further every address is in the next block.
    row_step = width * element_size
    mask_step = width // 8
    edge_step = np.array([row_step, mask_step if len(mask_table) else 0])
    steps = np.concatenate(
        [
            begins * 0,
            np.tile(edge_step, len(chosen)),
            np.full(len(receiver_masks), mask_step),
            beyond,
        ]
    )
    tables = np.arange(num_blocks)[:, None] * steps
    tables += np.concatenate([begins, edges.ravel(), receiver_masks, beyond])
    return _rows.to_device(tables, device), most
