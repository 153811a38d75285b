"""Kernels of the steps of local training on flat rows.

A program owns a tile of columns; every value is read once and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from lightfed_kernels._rows import check_grid
from lightfed_kernels.gpu.masks import WIDE, on_device

WARPS = 4

# Columns that a program owns; a multiple of 32.
TILE = 1024


@triton.jit(do_not_specialize=["size", "span"])
def sgd_kernel(
    row_ptr, gradient_ptr, buffer_ptr, anchor_ptr, scale_ptr, rate_ptr, words_ptr, size, span,
    lr: tl.float64, momentum: tl.float64, weight_decay: tl.float64, prox: tl.float64,
    WIDE: tl.constexpr, SCALE: tl.constexpr, RATE: tl.constexpr, DECAY: tl.constexpr,
    PROX: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MASK: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One step of SGD on a row w with gradient g, everything read and written once.

        d = scale g + weight_decay w + prox (w - anchor);  buffer <- momentum buffer + d
        w <- mask ? w - lr (buffer, or d + momentum buffer if NESTEROV, or d without MOMENTUM) : 0

    A program owns WORDS * 32 columns, as many as WORDS words of the mask have bits. With RATE, lr
    is read from the device. Every `span` words have a scale.
    """
    base = tl.program_id(0).to(tl.int64) * (WORDS * 32)
    word, bit = tl.arange(0, WORDS), tl.arange(0, 32)
    lane = word[:, None] * 32 + bit[None, :]
    there = word < (tl.minimum(size - base, WORDS * 32) // 32).to(tl.int32)
    here = tl.broadcast_to(there[:, None], [WORDS, 32])
    TYPE: tl.constexpr = row_ptr.dtype.element_ty
    w = tl.load(row_ptr + base + lane, mask=here, other=0).to(WIDE)
    d = tl.load(gradient_ptr + base + lane, mask=here, other=0).to(WIDE)
    if SCALE:
        d = d * _scales(scale_ptr, base, word, there, span).to(WIDE)
    if DECAY:
        d = d + tl.full([], weight_decay, WIDE) * w
    if PROX:
        anchor = tl.load(anchor_ptr + base + lane, mask=here, other=0).to(WIDE)
        d = d + tl.full([], prox, WIDE) * (w - anchor)
    if MOMENTUM:
        factor = tl.full([], momentum, WIDE)
        buffer = tl.load(buffer_ptr + base + lane, mask=here, other=0).to(WIDE)
        buffer = factor * buffer + d
        tl.store(buffer_ptr + base + lane, buffer.to(TYPE), mask=here)
        d = d + factor * buffer if NESTEROV else buffer
    rate = tl.load(rate_ptr).to(WIDE) if RATE else tl.full([], lr, WIDE)
    w = w - rate * d
    if MASK:
        words = tl.load(words_ptr + base // 32 + word, mask=there, other=0)
        # A select: a NaN under a 0 bit does not stay.
        w = tl.where((words[:, None] >> bit[None, :]) & 1 != 0, w, 0.0)
    tl.store(row_ptr + base + lane, w.to(TYPE), mask=here)


@triton.jit
def _scales(scale_ptr, base, word, there, span):
    """(WORDS, 1) what gradients are multiplied with."""
    part = ((base // 32).to(tl.int32) + word) // span
    return tl.load(scale_ptr + part, mask=there, other=0)[:, None]


@triton.jit(do_not_specialize=["size", "span"])
def adam_kernel(
    row_ptr, gradient_ptr, average_ptr, square_ptr, scale_ptr, numbers_ptr, words_ptr, size, span,
    beta1: tl.float64, beta2: tl.float64, eps: tl.float64, weight_decay: tl.float64,
    WIDE: tl.constexpr, SCALE: tl.constexpr, DECAY: tl.constexpr, MASK: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One step of Adam on a row w with gradient g, everything read and written once.

        d = scale g + weight_decay w
        average <- average + (1 - beta1) (d - average);  square <- beta2 square + (1 - beta2) d d
        w <- mask ? keep w - step average / (sqrt(square) / root + eps) : 0

    `numbers_ptr` has step, root and keep. A program owns WORDS * 32 columns; every `span` words
    have a scale.
    """
    base = tl.program_id(0).to(tl.int64) * (WORDS * 32)
    word, bit = tl.arange(0, WORDS), tl.arange(0, 32)
    lane = word[:, None] * 32 + bit[None, :]
    there = word < (tl.minimum(size - base, WORDS * 32) // 32).to(tl.int32)
    here = tl.broadcast_to(there[:, None], [WORDS, 32])
    TYPE: tl.constexpr = row_ptr.dtype.element_ty
    w = tl.load(row_ptr + base + lane, mask=here, other=0).to(WIDE)
    d = tl.load(gradient_ptr + base + lane, mask=here, other=0).to(WIDE)
    if SCALE:
        d = d * _scales(scale_ptr, base, word, there, span).to(WIDE)
    if DECAY:
        d = d + tl.full([], weight_decay, WIDE) * w
    average = tl.load(average_ptr + base + lane, mask=here, other=0).to(WIDE)
    average = average + tl.full([], 1 - beta1, WIDE) * (d - average)
    tl.store(average_ptr + base + lane, average.to(TYPE), mask=here)
    square = tl.load(square_ptr + base + lane, mask=here, other=0).to(WIDE)
    square = tl.full([], beta2, WIDE) * square + tl.full([], 1 - beta2, WIDE) * d * d
    tl.store(square_ptr + base + lane, square.to(TYPE), mask=here)
    step, root = tl.load(numbers_ptr).to(WIDE), tl.load(numbers_ptr + 1).to(WIDE)
    least = tl.full([], eps, WIDE)
    if WIDE == tl.float32:  # the rounding of torch; in float64 there is no other
        change = tl.div_rn(step * average, tl.div_rn(tl.sqrt_rn(square), root) + least)
    else:
        change = step * average / (tl.sqrt(square) / root + least)
    w = tl.load(numbers_ptr + 2).to(WIDE) * w - change
    if MASK:
        words = tl.load(words_ptr + base // 32 + word, mask=there, other=0)
        w = tl.where((words[:, None] >> bit[None, :]) & 1 != 0, w, 0.0)
    tl.store(row_ptr + base + lane, w.to(TYPE), mask=here)


@triton.jit(do_not_specialize=["size"])
def aspg_kernel(
    point_ptr, x_ptr, gradient_ptr, anchor_ptr, rate_ptr, size, lr: tl.float64, gamma: tl.float64,
    extrapolation: tl.float64, low: tl.float64, high: tl.float64, WIDE: tl.constexpr,
    RATE: tl.constexpr, BOX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FedBCD (4b) and the extrapolation (4a) of the step after it.

        x' = clamp(point - lr (gradient + gamma (point - anchor)), low, high)
        point <- x' + extrapolation (x' - x);  x <- x'

    A program owns BLOCK columns. With RATE, lr is read from the device.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    left = tl.minimum(size - base, BLOCK).to(tl.int32)
    here = lane < tl.multiple_of(left, 32)
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    point = tl.load(point_ptr + base + lane, mask=here, other=0).to(WIDE)
    anchor = tl.load(anchor_ptr + base + lane, mask=here, other=0).to(WIDE)
    d = tl.load(gradient_ptr + base + lane, mask=here, other=0).to(WIDE)
    d = d + tl.full([], gamma, WIDE) * (point - anchor)
    rate = tl.load(rate_ptr).to(WIDE) if RATE else tl.full([], lr, WIDE)
    new = point - rate * d
    if BOX:
        # Comparisons with NaN are false: it stays visible.
        new = tl.where(new > high, tl.full([], high, WIDE), new)
        new = tl.where(new < low, tl.full([], low, WIDE), new)
    old = tl.load(x_ptr + base + lane, mask=here, other=0).to(WIDE)
    point = new + tl.full([], extrapolation, WIDE) * (new - old)
    tl.store(point_ptr + base + lane, point.to(TYPE), mask=here)
    tl.store(x_ptr + base + lane, new.to(TYPE), mask=here)


def _span(row: Tensor, scale: Tensor | None) -> int:
    """Words that have one scale."""
    return row.shape[0] // 32 // (1 if scale is None else scale.numel())


def launch_sgd(
    row: Tensor, gradient: Tensor, buffer: Tensor | None, anchor: Tensor | None,
    scale: Tensor | None, rate: Tensor | None, words: Tensor | None, lr: float, momentum: float,
    weight_decay: float, prox: float, nesterov: bool,
) -> None:  # fmt: skip
    programs = -(-row.shape[0] // TILE)
    check_grid("row", programs)
    with on_device(row):
        sgd_kernel[(programs,)](
            row, gradient, row if buffer is None else buffer, row if anchor is None else anchor,
            row if scale is None else scale, row if rate is None else rate,
            row if words is None else words, row.shape[0], _span(row, scale), lr, momentum,
            weight_decay, prox,
            WIDE=WIDE[row.dtype], SCALE=scale is not None, RATE=rate is not None,
            DECAY=weight_decay != 0, PROX=anchor is not None, MOMENTUM=buffer is not None,
            NESTEROV=nesterov, MASK=words is not None, WORDS=TILE // 32, num_warps=WARPS,
        )  # fmt: skip


def launch_adam(
    row: Tensor, gradient: Tensor, average: Tensor, square: Tensor, scale: Tensor | None,
    numbers: Tensor, words: Tensor | None, beta1: float, beta2: float, eps: float,
    weight_decay: float,
) -> None:  # fmt: skip
    programs = -(-row.shape[0] // TILE)
    check_grid("row", programs)
    with on_device(row):
        adam_kernel[(programs,)](
            row, gradient, average, square, row if scale is None else scale, numbers,
            row if words is None else words, row.shape[0], _span(row, scale), beta1, beta2, eps,
            weight_decay, WIDE=WIDE[row.dtype], SCALE=scale is not None, DECAY=weight_decay != 0,
            MASK=words is not None, WORDS=TILE // 32,
            num_warps=WARPS if row.element_size() == 2 else 2 * WARPS,  # 16 bytes a thread
        )  # fmt: skip


def launch_aspg(
    point: Tensor, x: Tensor, gradient: Tensor, anchor: Tensor, rate: Tensor | None, lr: float,
    gamma: float, extrapolation: float, box: tuple[float, float] | None,
) -> None:  # fmt: skip
    programs = -(-x.shape[0] // TILE)
    check_grid("x", programs)
    low, high = box or (0.0, 0.0)
    with on_device(x):
        aspg_kernel[(programs,)](
            point, x, gradient, anchor, x if rate is None else rate, x.shape[0], lr, gamma,
            extrapolation, low, high, WIDE=WIDE[x.dtype], RATE=rate is not None,
            BOX=box is not None, BLOCK=TILE, num_warps=WARPS,
        )  # fmt: skip
