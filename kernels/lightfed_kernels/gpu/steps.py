"""The kernel of FedBCD's step of local training on flat rows.

A program owns a tile of columns. Every value is read once and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from lightfed_kernels._rows import check_grid
from lightfed_kernels.gpu.masks import WIDE, on_device

WARPS = 4

# Columns that a program owns; a multiple of 32.
TILE = 1024


@triton.jit(do_not_specialize=["size"])
def aspg_kernel(
    point_ptr, x_ptr, gradient_ptr, anchor_ptr, size, lr: tl.float64, gamma: tl.float64,
    extrapolation: tl.float64, low: tl.float64, high: tl.float64, WIDE: tl.constexpr,
    BOX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FedBCD (4b), and the extrapolation (4a) of the step after it.

        x' = clamp(point - lr (gradient + gamma (point - anchor)), low, high)
        point <- x' + extrapolation (x' - x);  x <- x'

    A program owns BLOCK columns.

    Args:
        point_ptr: (size,) where the gradient was taken; read and written.
        x_ptr: (size,) the iterate; read and written.
        gradient_ptr: (size,).
        anchor_ptr: (size,) the server's model.
        size: The number of elements, a multiple of 32.
        lr: The step size.
        gamma: The weight of the proximal term.
        extrapolation: The zeta of (4a).
        low: The lower bound of every element, if BOX.
        high: The upper bound.
        WIDE: The type of the arithmetic; float32 for bfloat16.
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
    new = point - tl.full([], lr, WIDE) * d
    if BOX:
        # Comparisons with NaN are false: it stays visible.
        new = tl.where(new > high, tl.full([], high, WIDE), new)
        new = tl.where(new < low, tl.full([], low, WIDE), new)
    old = tl.load(x_ptr + base + lane, mask=here, other=0).to(WIDE)
    point = new + tl.full([], extrapolation, WIDE) * (new - old)
    tl.store(point_ptr + base + lane, point.to(TYPE), mask=here)
    tl.store(x_ptr + base + lane, new.to(TYPE), mask=here)


def launch_aspg(
    point: Tensor, x: Tensor, gradient: Tensor, anchor: Tensor, lr: float, gamma: float,
    extrapolation: float, box: tuple[float, float] | None,
) -> None:  # fmt: skip
    """Launch the step; the arguments are those of `lightfed_kernels.steps.aspg_torch`."""
    programs = -(-x.shape[0] // TILE)
    check_grid("x", programs)
    low, high = (0.0, 0.0) if box is None else box
    with on_device(x):
        aspg_kernel[(programs,)](
            point, x, gradient, anchor, x.shape[0], lr, gamma, extrapolation, low, high,
            WIDE=WIDE[x.dtype], BOX=box is not None, BLOCK=TILE, num_warps=WARPS,
        )  # fmt: skip
