"""Means over groups of clients per range of columns, written back to the clients (FlexiFed).

Sums over clients are held in float64 and rounded to the rows' type once. For whole-number weights
the products are exact. So are the sums, unless the magnitudes of addends differ by more
than about 2^18. The bits of a result then depend neither on the order of the clients, nor on their
placement on ranks, nor on the backend.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._means_torch import mean_torch, spread_torch, sum_torch
from lightfed_kernels._memory import check_apart
from lightfed_kernels._rows import backend
from lightfed_kernels.groups import Groups


def grouped_mean_(rows: _rows.Rows, groups: Groups, weights: Sequence[float] | None = None) -> None:
    """The mean over the members of every job, written to all of them in place.

        x_k[start:stop] <- sum_m w_m x_m[start:stop] / sum_m w_m      k, m in members

    A member of weight 0 does not contribute to a mean but receives it; a job of total weight 0
    keeps its rows. Sums are held in float64. Columns outside all jobs keep their bits.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.

    Args:
        rows: x, (clients, P), or a sequence of rows whose lengths may differ.
        groups: the jobs, built for rows of these lengths.
        weights: w, (clients,), 0 or more; None weighs all the same.

    Raises:
        ValueError, TypeError: rows or weights that do not fit; names the argument.
    """
    given, shares = _checked(rows, groups, weights)
    check_apart(("rows", given))
    if not groups.members.numel():
        return
    if backend(groups.tiles, *given) == "triton":
        from lightfed_kernels.gpu.rows import launch_means

        launch_means(given, groups, weights=shares)
    else:
        mean_torch(given, groups.jobs, groups.members, shares)


def grouped_sum(rows: _rows.Rows, groups: Groups, weights: Sequence[float] | None = None) -> Tensor:
    """sum_m w_m x_m of every job over this rank's members, float64 (groups.columns,), packed.

    Sums of all ranks are added up by the caller and go to `grouped_spread_`. Arguments and errors
    as `grouped_mean_`.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.
    """
    given, shares = _checked(rows, groups, weights)
    sums = torch.empty(groups.columns, dtype=torch.float64, device=groups.tiles.device)
    if not groups.members.numel():
        return sums.zero_()
    if backend(sums, *given) == "triton":
        from lightfed_kernels.gpu.rows import launch_means

        launch_means(given, groups, weights=shares, sums=sums)
    else:
        sum_torch(sums, given, groups.jobs, groups.members, shares)
    return sums


def grouped_spread_(
    rows: _rows.Rows, sums: Tensor, groups: Groups, totals: Sequence[float]
) -> None:
    """x_k[start:stop] <- sums / totals of every job, for this rank's members, in place.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.

    Args:
        rows: this rank's, as `grouped_mean_` takes them.
        sums: (groups.columns,) float64, what `grouped_sum` gave, added up over the ranks.
        groups: this rank's jobs.
        totals: (jobs,) sum of the weights (the number, without weights) of every job's members on
            all ranks; a job of total 0 keeps its rows.

    Raises:
        ValueError, TypeError: an argument that does not fit; names it.
    """
    given, _ = _checked(rows, groups, None)
    if sums.dtype != torch.float64:
        raise TypeError(f"sums: {sums.dtype}; sums over clients are torch.float64")
    if sums.shape != (groups.columns,) or not sums.is_contiguous():
        found = list(sums.shape)
        raise ValueError(f"sums: of shape {found}; contiguous [{groups.columns}] is needed")
    divisors = _weights("totals", totals, len(groups.jobs))
    _rows.check_one_device(groups=groups.tiles, sums=sums)
    check_apart(("rows", given), ("sums", [sums]))
    if not groups.members.numel():
        return
    if backend(sums, *given) == "triton":
        from lightfed_kernels.gpu.rows import launch_means

        launch_means(given, groups, sums=sums, totals=divisors)
    else:
        spread_torch(given, sums, groups.jobs, groups.members, divisors)


def _checked(
    rows: _rows.Rows, groups: Groups, weights: Sequence[float] | None
) -> tuple[list[Tensor], Tensor | None]:
    given = _rows.as_list(rows)
    _rows.check_rows("rows", given)
    lengths = [tensor.shape[-1] for tensor in given for _ in range(_rows.count_rows([tensor]))]
    if len(lengths) != len(groups.sizes):
        raise ValueError(f"rows: {len(lengths)}; groups is built for {len(groups.sizes)}")
    for position, (found, size) in enumerate(zip(lengths, groups.sizes, strict=True)):
        if found != size:
            which = f"rows: row {position} has {found} elements"
            raise ValueError(f"{which}; groups is built for {size}")
    _rows.check_one_device(groups=groups.tiles, rows=given)
    return given, None if weights is None else _weights("weights", weights, len(lengths))


def _weights(name: str, weights: Sequence[float], count: int) -> Tensor:
    """(count,) float64 on the host, of weights that are finite and 0 or more."""
    if len(weights) != count:
        raise ValueError(f"{name}: {len(weights)} given; {count} numbers are needed")
    for position, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"{name}[{position}]: {weight}; a weight is finite and 0 or more")
    return torch.tensor(weights, dtype=torch.float64)
