"""FedBCD's step of local training on flat rows, fused: on a GPU values are read and written once.

Rows of bfloat16 are computed with in float32, and rounded once at the end of a step.
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
    """Take one accelerated stochastic proximal-gradient step of FedBCD, eq. (4b) and then (4a).

        x_new = clamp(point - lr * (gradient + gamma * (point - anchor)), *box)
        point <- x_new + extrapolation * (x_new - x);  x <- x_new

    `point` and `x` are changed in place. The step can be captured in a CUDA graph, which keeps the
    numbers of the call.

    Args:
        point: (P,), where the gradient was taken: before the first step
            x + extrapolation * (x - x before it), which is x if nothing was before.
        x: (P,), the iterate.
        gradient: (P,), at `point`.
        anchor: (P,), the server's model z.
        lr: The step size.
        gamma: The weight of the proximal term.
        extrapolation: The zeta of eq. (4a).
        box: The lower and upper bound of every element, with 0 between them, because padding is 0;
            None for no bounds.

    Returns:
        `x`.

    Raises:
        ValueError: Shapes, devices or numbers do not fit.
        TypeError: A dtype is not supported, or is not that of the others.
    """
    read = {"point": point, "gradient": gradient, "anchor": anchor}
    _rows.check_vector("x", x)
    for name, tensor in read.items():
        _rows.check_vector(name, tensor, size=x.shape[0], dtype=x.dtype)
    _rows.check_one_device(x=x, **read)
    # An operator takes no tuple that may be None.
    low, high = (0.0, 0.0) if box is None else box
    bounded = box is not None
    _aspg_step(point, x, gradient, anchor, lr, gamma, extrapolation, low, high, bounded)
    return x


def _check_numbers(**numbers: float) -> None:
    """Refuse numbers, given by name, that are negative or not finite."""
    for name, number in numbers.items():
        if not (isfinite(number) and number >= 0):
            raise ValueError(f"{name}: {number}; a finite number of 0 or more is needed")


@torch.library.custom_op("lightfed::aspg_step", mutates_args=("point", "x"))
def _aspg_step(
    point: Tensor, x: Tensor, gradient: Tensor, anchor: Tensor, lr: float, gamma: float,
    extrapolation: float, low: float, high: float, bounded: bool,
) -> None:  # fmt: skip
    """Check the numbers, and take the step on the backend of the tensors."""
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
    """Take the step by operations of torch, chunk by chunk.

    Args:
        point: As of `aspg_step_`, like the others.
        x: The iterate.
        gradient: The gradient.
        anchor: The server's model.
        lr: The step size.
        gamma: The weight of the proximal term.
        extrapolation: The zeta of eq. (4a).
        box: The bounds; None for none.
    """
    for chunk in _chunks(x):
        old_x = _wide(x[chunk])
        wide_point = _wide(point[chunk])

        # (4b), in one buffer: the gradient of the proximal term, of the objective, and the step.
        new_x = torch.sub(wide_point, _wide(anchor[chunk]))
        torch.add(_wide(gradient[chunk]), new_x, alpha=gamma, out=new_x)
        torch.add(wide_point, new_x, alpha=-lr, out=new_x)
        if box is not None:
            new_x.clamp_(*box)

        # (4a), in the memory of the old point, unless that is bfloat16.
        torch.sub(new_x, old_x, out=wide_point)
        torch.add(new_x, wide_point, alpha=extrapolation, out=wide_point)
        if wide_point.dtype != point.dtype:
            point[chunk].copy_(wide_point)
        x[chunk].copy_(new_x)


def _chunks(row: Tensor) -> Iterator[slice]:
    """Yield the parts of a row that are updated at a time; on a GPU that is all of it."""
    size = row.shape[0]
    length = size if row.is_cuda else CHUNK * torch.get_num_threads()
    for begin in range(0, size, length):
        yield slice(begin, min(begin + length, size))


def _wide(values: Tensor) -> Tensor:
    """Return values to compute with: bfloat16 as a copy in float32, others as they are."""
    return values.float() if values.dtype == torch.bfloat16 else values
