"""Weighted means of rows; whole, or as sums that ranks add up.

Sums over clients are held in float64 and rounded to the rows' type once. For whole-number weights
the products are exact. So are the sums, unless the magnitudes of addends differ by more
than about 2^18. The bits of a result then depend neither on the order of the clients, nor on their
placement on ranks, nor on the backend.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._dispatch import backend, checking
from lightfed_kernels._means_torch import (
    one_job,
    sum_torch,
    weighted_mean_torch,
)
from lightfed_kernels._memory import check_apart

Weights = Sequence[float] | Tensor


def weighted_mean(rows: _rows.Rows, weights: Weights, *, out: Tensor | None = None) -> Tensor:
    """sum_k w_k x_k / sum_k w_k, (P,): FedAvg's server.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.

    Args:
        rows: x, (clients, P) or a sequence of rows.
        weights: w, (clients,), 0 or more; rows of weight 0 are not read.
        out: (P,) for the mean; it must not share memory with `rows`.

    Raises:
        ValueError: shapes, devices or weights that do not fit; a total weight of 0.
        TypeError: of an unsupported dtype, or dtypes that differ.
    """
    given, shares = _checked(rows, weights)
    if out is None:
        out = torch.empty(given[0].shape[-1], dtype=given[0].dtype, device=given[0].device)
    _rows.check_vector("out", out, size=given[0].shape[-1], dtype=given[0].dtype)
    _rows.check_one_device(rows=given, out=out)
    _weighted_mean(out, given, shares)
    return out


def weighted_sum(rows: _rows.Rows, weights: Weights) -> Tensor:
    """sum_k w_k x_k in float64, (P,): one rank's part of a mean.

    Added up over the ranks and divided by the weights of all ranks it is `weighted_mean`.
    Arguments and errors as there.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.
    """
    given, shares = _checked(rows, weights)
    sums = torch.empty(given[0].shape[-1], dtype=torch.float64, device=given[0].device)
    _rows.check_one_device(rows=given)
    _weighted_sum(sums, given, shares)
    return sums


def as_weights(name: str, weights: Weights | float, count: int, device: torch.device) -> Tensor:
    """(count,) float64, in host memory or on the device of the rows, as they were given."""
    if not isinstance(weights, Tensor):
        numbers = [weights] if isinstance(weights, int | float) else list(weights)
        weights = torch.tensor(numbers, dtype=torch.float64)
    if weights.numel() != count or weights.dim() > 1:
        raise ValueError(f"{name}: of shape {list(weights.shape)}; {count} numbers are needed")
    if weights.is_complex() or weights.dtype == torch.bool:
        raise TypeError(f"{name}: {weights.dtype}; real numbers are needed")
    if weights.device.type != "cpu" and weights.device != device:
        raise ValueError(f"{name}: on {weights.device}; the rows are on {device}")
    return weights.reshape(count).to(torch.float64)


def check_weights(name: str, weights: Tensor) -> None:
    """Check that weights are finite and 0 or more, unless that would wait for a device."""
    if weights.is_cuda and not checking():
        return
    for position, weight in enumerate(weights.tolist()):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"{name}[{position}]: {weight}; a weight is finite and 0 or more")


def check_sums(sums: Tensor, size: int) -> None:
    if sums.dtype != torch.float64:
        raise TypeError(f"sums: {sums.dtype}; sums over clients are torch.float64")
    if sums.dim() != 1 or sums.shape[0] != size or not sums.is_contiguous():
        raise ValueError(f"sums: of shape {list(sums.shape)}; contiguous [{size}] is needed")


def _checked(rows: _rows.Rows, weights: Weights) -> tuple[list[Tensor], Tensor]:
    given = _rows.as_list(rows)
    if not given:
        raise ValueError("rows: none; a matrix (0, P) says how long a row would be")
    _rows.check_rows("rows", given, size=given[0].shape[-1] if given[0].dim() else None)
    return given, as_weights("weights", weights, _rows.count_rows(given), given[0].device)


@torch.library.custom_op("lightfed::weighted_mean", mutates_args=("out",))
def _weighted_mean(out: Tensor, rows: Sequence[Tensor], weights: Tensor) -> None:
    check_weights("weights", weights)
    if (not weights.is_cuda or checking()) and not weights.sum() > 0:
        raise ValueError("weights: their sum is 0; a mean needs a weight above 0")
    check_apart(("out", [out]), ("rows", rows))
    if out.numel() == 0:
        return
    if backend(out, *rows) == "triton":
        from lightfed_kernels.gpu.rows import launch_means

        launch_means("out", rows, *one_job(rows, out.shape[0]), weights=weights, out=out)
    else:
        weighted_mean_torch(out, rows, weights)


@torch.library.custom_op("lightfed::weighted_sum", mutates_args=("sums",))
def _weighted_sum(sums: Tensor, rows: Sequence[Tensor], weights: Tensor) -> None:
    check_weights("weights", weights)
    if sums.numel() == 0:
        return
    jobs, members = one_job(rows, sums.shape[0])
    if backend(sums, *rows) == "triton":
        from lightfed_kernels.gpu.rows import launch_means

        launch_means("sums", rows, jobs, members, weights=weights, sums=sums)
    else:
        sum_torch(sums, rows, jobs, members, weights)


for _operator in (_weighted_mean, _weighted_sum):
    _operator.register_fake(lambda *arguments: None)
