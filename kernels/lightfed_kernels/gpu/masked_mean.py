"""One launch for the means of all receivers."""

from collections.abc import Sequence

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
    lanes = tl.arange(0, 32)
    elements = word[:, None] * 32 + lanes[None, :]
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
    for e in tl.range(begin, end, num_stages=3):
        row = tl.multiple_of(tl.load(edges + 2 * e).to(tl.pointer_type(DTYPE)), 16)
        value = tl.load(row + elements, mask=inside[:, None], other=0.0).to(ACC)
        if MASKED:
            mask = tl.load(edges + 2 * e + 1).to(tl.pointer_type(tl.int32))
            words = tl.load(mask + word, mask=inside, other=0)
            bits = (words[:, None] >> lanes[None, :]) & 1
            value = tl.where(bits != 0, value, 0.0)
        if weights is not None:
            weight = tl.load(weights + e)
            value = value * weight
        if COUNTED:
            share = bits.to(ACC)
            if weights is not None:
                share = share * weight
            both += tl.join(value, share)
        else:
            total += value
            if weights is not None:
                count += weight
            else:
                count += 1.0
    if COUNTED:
        total, count = tl.split(both)
    count = tl.where(count > 0, count, 1.0)
    if ACC == tl.float64:
        mean = total / count
    else:
        # `/` is an approximation in float32.
        mean = tl.div_rn(total, tl.broadcast_to(count, [WORDS, 32]))
    if KEPT:
        stay = tl.load(edges + 2 * tl.load(table + n_receivers) + receiver)
        words = tl.load(stay.to(tl.pointer_type(tl.int32)) + word, mask=inside, other=0)
        mean = tl.where(((words[:, None] >> lanes[None, :]) & 1) != 0, mean, 0.0)
    target = tl.multiple_of(out + receiver.to(tl.int64) * out_stride, 16)
    tl.store(target + elements, mean.to(DTYPE), mask=inside[:, None])


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
    steps = [first.numpy() * 0, np.tile(further, len(chosen)), np.full(len(kept), width // 8)]
    blocks = np.arange(-(-size // width))[:, None] * np.concatenate(steps)
    blocks += np.concatenate([first.numpy(), edges.ravel(), kept])
    tables = _rows.to_device(blocks, out.device)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    shares = None
    if weights is not None:
        shares = _rows.to_device(weights.to(wide).numpy(), out.device)
    _rows.check_grid("masked_mean", -(-width // (32 * words)) * len(out))
    with on_device(out):
        for table, begin in zip(tables, range(0, size, width), strict=True):
            n_words = min(width, size - begin) // 32
            masked_mean[(-(-n_words // words) * len(out),)](
                table, shares, out, out.stride(0), n_words, len(out), WORDS=words,
                DTYPE=TYPES[out.dtype], ACC=TYPES[wide], MASKED=bool(masks),
                COUNTED=bool(masks) and not over_neighbours, KEPT=bool(receivers), num_warps=WARPS,
            )  # fmt: skip
            if into is not None:
                into[:, begin : begin + width].copy_(out[:, : size - begin])
