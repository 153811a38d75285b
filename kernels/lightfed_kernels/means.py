"""Means over groups of clients per range of columns, written back to the clients (FlexiFed).

Sums over clients are held in float64 and rounded to the rows' type once. For whole-number weights
the products are exact. So are the sums, unless the magnitudes of addends differ by more
than about 2^18. The bits of a result then depend neither on the order of the clients, nor on their
placement on ranks, nor on the backend.
"""

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._memory import check_apart
from lightfed_kernels._rows import backend, each_row
from lightfed_kernels.groups import Groups

# Elements that a core sums at a time: 1 MiB in float64. Every call of torch costs microseconds.
CHUNK = 131072


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


def sum_torch(
    sums: Tensor, rows: Sequence[Tensor], jobs: Tensor, members: Tensor, weights: Tensor | None
) -> None:
    """Into `sums`, packed: the sums of all jobs back to back."""
    for job, begin, end, total, _ in _sums(rows, jobs, members, weights):
        place = job[4] - job[0]
        sums[place + begin : place + end].copy_(total)


def mean_torch(
    rows: Sequence[Tensor], jobs: Tensor, members: Tensor, weights: Tensor | None
) -> None:
    """Into the rows of every job's members."""
    every = each_row(rows)
    for job, begin, end, total, weight in _sums(rows, jobs, members, weights):
        _spread(every, members[job[2] : job[3]].tolist(), begin, end, total, weight)


def spread_torch(
    rows: Sequence[Tensor], sums: Tensor, jobs: Tensor, members: Tensor, totals: Tensor
) -> None:
    """Into the rows of every job's members, given its sum and its total."""
    every = each_row(rows)
    for weight, job in zip(totals.tolist(), jobs.tolist(), strict=True):
        for begin, end in _chunks(job[0], job[1], sums):
            place = job[4] - job[0]
            total = sums[place + begin : place + end]
            _spread(every, members[job[2] : job[3]].tolist(), begin, end, total, weight)


def _sums(
    rows: Sequence[Tensor], jobs: Tensor, members: Tensor, weights: Tensor | None
) -> Iterator[tuple[list[int], int, int, Tensor, float]]:
    """Job, columns, sum (overwritten by the next) and total weight of every chunk of every job."""
    every = each_row(rows)
    shares = None if weights is None else weights.tolist()
    longest = max((stop - start for start, stop, *_ in jobs.tolist()), default=0)
    length = min(longest, _step(rows[0]))
    scratch = torch.empty(length, dtype=torch.float64, device=rows[0].device)
    for job in jobs.tolist():
        chosen = members[job[2] : job[3]].tolist()
        parts = [1.0 if shares is None else shares[member] for member in chosen]
        for begin, end in _chunks(job[0], job[1], scratch):
            total = scratch[: end - begin].zero_()
            for member, part in zip(chosen, parts, strict=True):
                if part:  # a NaN times 0 is a NaN
                    total.add_(every[member][begin:end], alpha=part)
            yield job, begin, end, total, sum(parts)


def _spread(
    rows: Sequence[Tensor], chosen: list[int], begin: int, end: int, total: Tensor, weight: float
) -> None:
    if chosen and weight > 0:
        mean = (total / weight).to(rows[chosen[0]].dtype)
        for member in chosen:
            rows[member][begin:end].copy_(mean)


def _chunks(start: int, stop: int, like: Tensor) -> Iterator[tuple[int, int]]:
    step = _step(like)
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)


def _step(like: Tensor) -> int:
    """Columns to process at a time: what fits in the caches of a CPU, or all on a GPU."""
    return sys.maxsize if like.is_cuda else CHUNK * torch.get_num_threads()
