"""FedBCD's step of local training on flat rows, fused: on a GPU values are read and written once.

bfloat16 rows are computed with in float32 and rounded once at the end of a step.
"""

from collections.abc import Iterator
from math import isfinite

import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._memory import check_apart
from lightfed_kernels._rows import backend

# Elements that a core updates at a time: a handful of rows' chunks stays in its cache.
CHUNK = 65536


def aspg_step_(
    point: Tensor,
    x: Tensor,
    gradient: Tensor,
    anchor: Tensor,
    *,
    lr: float,
    gamma: float,
    extrapolation: float,
    box: tuple[float, float] | None,
) -> Tensor:
    """One accelerated stochastic proximal-gradient step of FedBCD in place, eq. (4b) and then (4a).

        x_new = clamp(point - lr * (gradient + gamma * (point - anchor)), *box)
        point <- x_new + extrapolation * (x_new - x);  x <- x_new

    Can be captured in a CUDA graph, which keeps the numbers of the call.

    Args:
        point: (P,), where the gradient was taken: before the first step
            x + extrapolation * (x - x before it), which is x where nothing was before.
        x: (P,), the iterate.
        gradient: (P,), at `point`.
        anchor: (P,), the server's model z.
        lr: the step size.
        gamma: weight of the proximal term.
        extrapolation: zeta, of eq. (4a).
        box: lower and upper bound of every element, 0 among them, as padding is; None for none.

    Returns:
        x.

    Raises:
        ValueError: shapes, devices or numbers that do not fit.
        TypeError: of an unsupported dtype, or dtypes that differ.
    """
    read = {"point": point, "gradient": gradient, "anchor": anchor}
    _rows.check_vector("x", x)
    for name, tensor in read.items():
        _rows.check_vector(name, tensor, size=x.shape[0], dtype=x.dtype)
    _rows.check_one_device(x=x, **read)
    bounds = (*(box or (0.0, 0.0)), box is not None)
    _aspg_step(point, x, gradient, anchor, lr, gamma, extrapolation, *bounds)
    return x


def _check_numbers(**numbers: float) -> None:
    for name, number in numbers.items():
        if not (isfinite(number) and number >= 0):
            raise ValueError(f"{name}: {number}; a finite number of 0 or more is needed")


@torch.library.custom_op("lightfed::aspg_step", mutates_args=("point", "x"))
def _aspg_step(
    point: Tensor, x: Tensor, gradient: Tensor, anchor: Tensor, lr: float, gamma: float,
    extrapolation: float, low: float, high: float, bounded: bool,
) -> None:  # fmt: skip
    _check_numbers(lr=lr, gamma=gamma, extrapolation=extrapolation)
    if bounded and not (low <= 0 <= high and low < high):
        raise ValueError(f"box: [{low}, {high}]; an interval around 0 is needed, or None")
    check_apart(("point, x", [point, x]), ("gradient", [gradient]), ("anchor", [anchor]))
    if x.numel() == 0:
        return
    if backend(x) == "triton":
        from lightfed_kernels.gpu.steps import launch_aspg as step
    else:
        step = aspg_torch
    box = (low, high) if bounded else None
    step(point, x, gradient, anchor, lr, gamma, extrapolation, box)


_aspg_step.register_fake(lambda *arguments: None)


def aspg_torch(
    point: Tensor, x: Tensor, gradient: Tensor, anchor: Tensor, lr: float, gamma: float,
    extrapolation: float, box: tuple[float, float] | None,
) -> None:  # fmt: skip
    for chunk in _chunks(x):
        p, old, g, a = (row[chunk] for row in (point, x, gradient, anchor))
        wide, before = _wide(p), _wide(old)
        new = torch.sub(wide, _wide(a))
        torch.add(_wide(g), new, alpha=gamma, out=new)
        torch.add(wide, new, alpha=-lr, out=new)
        if box is not None:
            new.clamp_(*box)
        torch.sub(new, before, out=wide)
        torch.add(new, wide, alpha=extrapolation, out=wide)
        _narrow(p, wide)
        old.copy_(new)


def _chunks(row: Tensor) -> Iterator[slice]:
    size = row.shape[0]
    length = size if row.is_cuda else CHUNK * torch.get_num_threads()
    for begin in range(0, size, length):
        yield slice(begin, min(begin + length, size))


def _wide(part: Tensor) -> Tensor:
    """To compute with: bfloat16 as a float32 copy, others as they are."""
    return part.float() if part.dtype == torch.bfloat16 else part


def _narrow(part: Tensor, wide: Tensor) -> None:
    if part is not wide:
        part.copy_(wide)
