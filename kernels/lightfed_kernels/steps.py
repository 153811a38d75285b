"""Steps of local training on flat rows, fused: every value is read and written once on a GPU.

`sgd_step_` is torch.optim.SGD with FedProx' term, clipping and a mask; `adam_step_` is Adam or
AdamW with both; `aspg_step_` is the step of FedBCD. bfloat16 rows are computed with in float32
and rounded once at the end of a step.
"""

from collections.abc import Mapping
from math import inf, isfinite

import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._dispatch import backend
from lightfed_kernels._memory import check_apart
from lightfed_kernels._steps_torch import adam_torch, aspg_torch, sgd_torch
from lightfed_kernels.layout import ALIGNMENT


def sgd_step_(
    row: Tensor,
    gradient: Tensor,
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    buffer: Tensor | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    prox: float = 0.0,
    anchor: Tensor | None = None,
    scale: Tensor | None = None,
    words: Tensor | None = None,
) -> Tensor:
    """One step of SGD in place; that of torch.optim.SGD without `prox`, `scale` and `words`.

        d = scale * gradient + weight_decay * row + prox * (row - anchor)
        buffer <- momentum * buffer + d
        row <- row - lr * (buffer,  or d + momentum * buffer (nesterov),  or d without momentum)
        row <- 0 where a bit of `words` is 0, even if gradient or row are NaN there

    Can be captured in a CUDA graph, which keeps the numbers of the call, but reads an `lr` on the
    device at every replay.

    Args:
        row: w, (P,).
        gradient: (P,), like `buffer` and `anchor` of the row's length and dtype.
        lr: the step size, or one number on the device.
        momentum: 0 or more.
        buffer: written if momentum is not 0 (else not touched); zeros before the first step. It is
            not masked, as it is not in DisPFL.
        weight_decay: 0 or more.
        nesterov: needs momentum.
        prox: FedProx' mu; if it is 0, `anchor` is not read.
        anchor: FedProx' global model.
        scale: on the device, of any floating dtype, such as a clipping coefficient: one number, or
            (K,) of the K rows that lie end to end in `row`.
        words: packed mask (P / 32,).

    Raises:
        ValueError: shapes, devices or numbers that do not fit; an argument that is missing.
        TypeError: of an unsupported dtype, or dtypes that differ.
    """
    read = {
        "gradient": gradient,
        "buffer": buffer if momentum != 0 else None,
        "anchor": anchor if prox != 0 else None,
    }
    _check_rows(row, read, words)
    if momentum != 0 and buffer is None:
        raise ValueError(f"buffer: missing; momentum is {momentum}")
    if nesterov and momentum == 0:
        raise ValueError("nesterov: needs a momentum above 0")
    if prox != 0 and anchor is None:
        raise ValueError(f"anchor: missing; prox is {prox}")
    _check_scale(row, scale)
    rate, number = _rate(lr)
    _rows.check_one_device(row=row, **read, scale=scale, lr=rate, words=words)
    _sgd_step(
        row, gradient, read["buffer"], read["anchor"], scale, rate, words, number, momentum,
        weight_decay, prox, nesterov,
    )  # fmt: skip
    return row


def adam_numbers(
    steps: int, *, lr: float, betas: tuple[float, float], decoupled_decay: float = 0.0
) -> Tensor:
    """(steps, 3) float64 on the host: what differs between the steps t = 1, 2, .. of `adam_step_`.

    Args:
        steps: of a session.
        lr: the step size.
        betas: as of the steps.
        decoupled_decay: AdamW's.

    Returns:
        lr / (1 - beta1^t), (1 - beta2^t)^0.5 and 1 - lr * decoupled_decay.
    """
    powers = ([1 - beta**t for beta in betas] for t in range(1, steps + 1))
    rows = [(lr / first, second**0.5, 1 - lr * decoupled_decay) for first, second in powers]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)


def adam_step_(
    row: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    numbers: Tensor,
    *,
    scale: Tensor | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    words: Tensor | None = None,
) -> Tensor:
    """One step in place, that of torch.optim.Adam or AdamW without `scale` and `words`.

        d = scale * gradient + weight_decay * row
        average <- beta1 * average + (1 - beta1) * d
        square <- beta2 * square + (1 - beta2) * d^2
        row <- keep * row - size * average / (sqrt(square) / root + eps)
        row <- 0 where a bit of `words` is 0, even if gradient or row are NaN there

    Can be captured in a CUDA graph, which keeps all but the values of tensors, such as `numbers`.

    Args:
        row: w, (P,).
        gradient: (P,), like `average` and `square` of the row's length and dtype.
        average: first moment, written, not masked; zeros before the first step.
        square: second moment, like it.
        numbers: (3,) float64 on the device: size, root, keep; a row of `adam_numbers`.
        scale: as of `sgd_step_`.
        betas: from 0 to below 1.
        eps: above 0, so that padding stays 0.
        weight_decay: Adam's, 0 or more; AdamW's is in `numbers`.
        words: packed mask (P / 32,).

    Raises:
        ValueError, TypeError: as of `sgd_step_`.
    """
    read = {"gradient": gradient, "average": average, "square": square}
    _check_rows(row, read, words)
    if numbers.shape != (3,) or numbers.dtype != torch.float64 or not numbers.is_contiguous():
        found = f"{numbers.dtype} of shape {list(numbers.shape)}"
        raise ValueError(f"numbers: {found}; three torch.float64 are needed")
    _check_scale(row, scale)
    _rows.check_one_device(row=row, **read, scale=scale, numbers=numbers, words=words)
    _adam_step(row, gradient, average, square, scale, numbers, words, *betas, eps, weight_decay)
    return row


def aspg_step_(
    point: Tensor,
    x: Tensor,
    gradient: Tensor,
    anchor: Tensor,
    *,
    lr: float | Tensor,
    gamma: float,
    extrapolation: float,
    box: tuple[float, float] | None,
) -> Tensor:
    """One accelerated stochastic proximal-gradient step of FedBCD in place, eq. (4b) and then (4a).

        x_new = clamp(point - lr * (gradient + gamma * (point - anchor)), *box)
        point <- x_new + extrapolation * (x_new - x);  x <- x_new

    Can be captured in a CUDA graph, which keeps the numbers of the call, but reads an `lr` on the
    device at every replay.

    Args:
        point: (P,), where the gradient was taken: before the first step
            x + extrapolation * (x - x before it), which is x where nothing was before.
        x: (P,), the iterate.
        gradient: (P,), at `point`.
        anchor: (P,), the server's model z.
        lr: the step size, or one number on the device.
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
    rate, number = _rate(lr)
    _rows.check_one_device(x=x, **read, lr=rate)
    bounds = (*(box or (0.0, 0.0)), box is not None)
    _aspg_step(point, x, gradient, anchor, rate, number, gamma, extrapolation, *bounds)
    return x


def _check_rows(row: Tensor, others: Mapping[str, Tensor | None], words: Tensor | None) -> None:
    _rows.check_vector("row", row)
    for name, tensor in others.items():
        if tensor is not None:
            _rows.check_vector(name, tensor, size=row.shape[0], dtype=row.dtype)
    if words is not None:
        _rows.check_single("words", words)
        _rows.check_words("words", words, size=row.shape[0])


def _rate(lr: float | Tensor) -> tuple[Tensor | None, float]:
    """A step size on the device, or as a number."""
    if not isinstance(lr, Tensor):
        return None, lr
    if lr.numel() != 1 or not lr.is_floating_point():
        raise ValueError(f"lr: {lr.dtype} of shape {list(lr.shape)}; one real number is needed")
    return lr, 0.0


def _check_scale(row: Tensor, scale: Tensor | None) -> None:
    if scale is None:
        return
    parts = scale.numel() and row.shape[0] % (ALIGNMENT * scale.numel()) == 0
    if not (parts and scale.is_floating_point() and scale.is_contiguous()):
        found = f"{scale.dtype} of shape {list(scale.shape)}"
        raise ValueError(f"scale: {found}; one real number is needed, or one for each equal part")


def _check_numbers(**numbers: float) -> None:
    for name, number in numbers.items():
        if not (isfinite(number) and number >= 0):
            raise ValueError(f"{name}: {number}; a finite number of 0 or more is needed")


@torch.library.custom_op("lightfed::sgd_step", mutates_args=("row", "buffer"))
def _sgd_step(
    row: Tensor, gradient: Tensor, buffer: Tensor | None, anchor: Tensor | None,
    scale: Tensor | None, rate: Tensor | None, words: Tensor | None, lr: float, momentum: float,
    weight_decay: float, prox: float, nesterov: bool,
) -> None:  # fmt: skip
    _check_numbers(lr=lr, momentum=momentum, weight_decay=weight_decay, prox=prox)
    written = [row] if buffer is None else [row, buffer]
    read = [("gradient", [gradient])] + ([] if anchor is None else [("anchor", [anchor])])
    check_apart(("row, buffer" if buffer is not None else "row", written), *read)
    if row.numel() == 0:
        return
    if backend(row) == "triton":
        from lightfed_kernels.gpu.steps import launch_sgd as step
    else:
        step = sgd_torch
    step(
        row, gradient, buffer, anchor, scale, rate, words, lr, momentum, weight_decay, prox,
        nesterov,
    )  # fmt: skip


@torch.library.custom_op("lightfed::adam_step", mutates_args=("row", "average", "square"))
def _adam_step(
    row: Tensor, gradient: Tensor, average: Tensor, square: Tensor, scale: Tensor | None,
    numbers: Tensor, words: Tensor | None, beta1: float, beta2: float, eps: float,
    weight_decay: float,
) -> None:  # fmt: skip
    _check_numbers(weight_decay=weight_decay)
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name}: {beta}; a number from 0 to below 1 is needed")
    if not 0 < eps < inf:
        raise ValueError(f"eps: {eps}; a finite number above 0 is needed")
    check_apart(("row, average, square", [row, average, square]), ("gradient", [gradient]))
    if row.numel() == 0:
        return
    if backend(row) == "triton":
        from lightfed_kernels.gpu.steps import launch_adam as step
    else:
        step = adam_torch
    step(row, gradient, average, square, scale, numbers, words, beta1, beta2, eps, weight_decay)


@torch.library.custom_op("lightfed::aspg_step", mutates_args=("point", "x"))
def _aspg_step(
    point: Tensor, x: Tensor, gradient: Tensor, anchor: Tensor, rate: Tensor | None, lr: float,
    gamma: float, extrapolation: float, low: float, high: float, bounded: bool,
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
    step(point, x, gradient, anchor, rate, lr, gamma, extrapolation, box)


for _operator in (_sgd_step, _adam_step, _aspg_step):
    _operator.register_fake(lambda *arguments: None)
