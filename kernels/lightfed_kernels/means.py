"""Means over groups of clients per range of columns, written back to the clients (FlexiFed).

Sums over clients are held in float64 and rounded to the rows' type once. For weights that are whole
numbers the products are exact. So are the sums, unless the addends of one element differ by a
factor of more than about 2^18. The bits of a result then depend neither on the order of the
clients, nor on their placement on ranks, nor on the backend.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._memory import check_apart
from lightfed_kernels._rows import backend, each_row
from lightfed_kernels.groups import Groups

# Elements that a core sums at a time: 1 MiB in float64 stays in its cache. Shorter chunks pay for
# more calls of torch, which cost microseconds each.
CHUNK = 131072


def grouped_mean_(rows: _rows.Rows, groups: Groups, weights: Sequence[float] | None = None) -> None:
    """Write the mean over the members of every job to all of them, in place.

        x_k[start:stop] <- sum_m w_m x_m[start:stop] / sum_m w_m      k, m in members

    A member of weight 0 does not contribute to a mean but receives it. A job of total weight 0
    keeps its rows. Sums are held in float64. Columns outside all jobs keep their bits.

    It cannot be captured in a CUDA graph, because addresses of rows are copied from the host.

    Args:
        rows: x, (clients, P), or a sequence of rows whose lengths may differ.
        groups: The jobs, built for rows of these lengths.
        weights: w, (clients,), 0 or more; None weighs all the same.

    Raises:
        ValueError: Rows or weights do not fit; names the argument.
        TypeError: A dtype is not supported, or is not that of the others.
    """
    row_list, checked_weights = _checked(rows, groups, weights)
    check_apart(("rows", row_list))
    if not groups.members.numel():
        return
    if backend(groups.tiles, *row_list) == "triton":
        from lightfed_kernels.gpu.rows import launch_means

        launch_means(row_list, groups, weights=checked_weights)
    else:
        mean_torch(row_list, groups.jobs, groups.members, checked_weights)


def grouped_sum(rows: _rows.Rows, groups: Groups, weights: Sequence[float] | None = None) -> Tensor:
    """Return the sum sum_m w_m x_m of every job over this rank's members.

    The caller adds up the sums of all ranks, and passes them to `grouped_spread_`. It cannot be
    captured in a CUDA graph, because addresses of rows are copied from the host.

    Args:
        rows: As for `grouped_mean_`, with the same errors.
        groups: The jobs.
        weights: w, as there.

    Returns:
        (groups.columns,) float64, the sums of all jobs back to back.
    """
    row_list, checked_weights = _checked(rows, groups, weights)
    sums = torch.empty(groups.columns, dtype=torch.float64, device=groups.tiles.device)
    if not groups.members.numel():
        return sums.zero_()
    if backend(sums, *row_list) == "triton":
        from lightfed_kernels.gpu.rows import launch_means

        launch_means(row_list, groups, weights=checked_weights, sums=sums)
    else:
        sum_torch(sums, row_list, groups.jobs, groups.members, checked_weights)
    return sums


def grouped_spread_(
    rows: _rows.Rows, sums: Tensor, groups: Groups, totals: Sequence[float]
) -> None:
    """Write x_k[start:stop] <- sums / totals of every job to this rank's members, in place.

    It cannot be captured in a CUDA graph, because addresses of rows are copied from the host.

    Args:
        rows: This rank's rows, as `grouped_mean_` takes them.
        sums: (groups.columns,) float64, what `grouped_sum` gave, added up over the ranks.
        groups: This rank's jobs.
        totals: (jobs,) the sum of the weights (without weights, the number) of every job's members
            on all ranks. A job of total 0 keeps its rows.

    Raises:
        ValueError: An argument does not fit; names it.
        TypeError: A dtype is not supported, or is not that of the others.
    """
    row_list, _ = _checked(rows, groups, None)
    if sums.dtype != torch.float64:
        raise TypeError(f"sums: {sums.dtype}; sums over clients are torch.float64")
    if sums.shape != (groups.columns,) or not sums.is_contiguous():
        shape = list(sums.shape)
        raise ValueError(f"sums: of shape {shape}; contiguous [{groups.columns}] is needed")
    divisors = _checked_weights("totals", totals, len(groups.jobs))
    _rows.check_one_device(groups=groups.tiles, sums=sums)
    check_apart(("rows", row_list), ("sums", [sums]))
    if not groups.members.numel():
        return
    if backend(sums, *row_list) == "triton":
        from lightfed_kernels.gpu.rows import launch_means

        launch_means(row_list, groups, sums=sums, totals=divisors)
    else:
        spread_torch(row_list, sums, groups.jobs, groups.members, divisors)


def _checked(
    rows: _rows.Rows, groups: Groups, weights: Sequence[float] | None
) -> tuple[list[Tensor], Tensor | None]:
    """Check rows and weights against the groups.

    Returns:
        The rows as a list of matrices and rows, and the weights as (clients,) of float64.
    """
    row_list = _rows.as_list(rows)
    _rows.check_rows("rows", row_list)
    lengths: list[int] = []
    for tensor in row_list:
        lengths += [tensor.shape[-1]] * _rows.count_rows([tensor])

    if len(lengths) != len(groups.sizes):
        raise ValueError(f"rows: {len(lengths)}; groups is built for {len(groups.sizes)}")
    for position, (length, size) in enumerate(zip(lengths, groups.sizes, strict=True)):
        if length != size:
            which = f"rows: row {position} has {length} elements"
            raise ValueError(f"{which}; groups is built for {size}")
    _rows.check_one_device(groups=groups.tiles, rows=row_list)
    if weights is None:
        return row_list, None
    return row_list, _checked_weights("weights", weights, len(lengths))


def _checked_weights(name: str, weights: Sequence[float], count: int) -> Tensor:
    """Return weights as (count,) of float64 on the host; they are finite and 0 or more."""
    if len(weights) != count:
        raise ValueError(f"{name}: {len(weights)} given; {count} numbers are needed")
    for position, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"{name}[{position}]: {weight}; a weight is finite and 0 or more")
    return torch.tensor(weights, dtype=torch.float64)


# The torch path. A job is a line of `Groups.jobs`, and all of them go chunk by chunk of columns.


@dataclass(frozen=True, slots=True)
class _Job:
    """One job, as the torch path reads it.

    Attributes:
        start: Its first column.
        stop: The column behind its last.
        place: Where its sum begins in packed sums.
        members: The rows that it has.
    """

    start: int
    stop: int
    place: int
    members: list[int]


def _jobs(jobs: Tensor, members: Tensor) -> list[_Job]:
    """Return the jobs of the tables of `Groups`."""
    every = []
    for start, stop, begin, end, place in jobs.tolist():
        every.append(_Job(start, stop, place, members[begin:end].tolist()))
    return every


def sum_torch(
    sums: Tensor, rows: Sequence[Tensor], jobs: Tensor, members: Tensor, weights: Tensor | None
) -> None:
    """Write the sums of all jobs back to back into `sums`.

    Args:
        sums: (columns,) float64.
        rows: Matrices and rows.
        jobs: (J, 5), as of `Groups`.
        members: (M,), as of `Groups`.
        weights: (clients,) float64; None if all weigh 1.
    """
    for job, begin, end, total, _ in _sums(rows, _jobs(jobs, members), weights):
        offset = job.place - job.start
        sums[offset + begin : offset + end].copy_(total)


def mean_torch(
    rows: Sequence[Tensor], jobs: Tensor, members: Tensor, weights: Tensor | None
) -> None:
    """Write the mean of every job into the rows of its members; arguments as of `sum_torch`."""
    every_row = each_row(rows)
    for job, begin, end, total, weight in _sums(rows, _jobs(jobs, members), weights):
        _spread(every_row, job.members, begin, end, total, weight)


def spread_torch(
    rows: Sequence[Tensor], sums: Tensor, jobs: Tensor, members: Tensor, totals: Tensor
) -> None:
    """Write the mean of every job into the rows of its members, given its sum and its total.

    Args:
        rows: Matrices and rows.
        sums: (columns,) float64, the sums of all jobs back to back.
        jobs: (J, 5), as of `Groups`.
        members: (M,), as of `Groups`.
        totals: (J,) float64.
    """
    every_row = each_row(rows)
    for weight, job in zip(totals.tolist(), _jobs(jobs, members), strict=True):
        offset = job.place - job.start
        for begin, end in _chunks(job.start, job.stop, sums):
            total = sums[offset + begin : offset + end]
            _spread(every_row, job.members, begin, end, total, weight)


def _sums(
    rows: Sequence[Tensor], jobs: Sequence[_Job], weights: Tensor | None
) -> Iterator[tuple[_Job, int, int, Tensor, float]]:
    """Yield the sums of all jobs, chunk by chunk.

    Yields:
        The job, the first column of the chunk and the one behind its last, the sum, which the next
        one overwrites, and the weight of all members.
    """
    every_row = each_row(rows)
    weight_of = None if weights is None else weights.tolist()
    longest = max((job.stop - job.start for job in jobs), default=0)
    length = min(longest, _step(rows[0]))
    buffer = torch.empty(length, dtype=torch.float64, device=rows[0].device)
    for job in jobs:
        if weight_of is None:
            member_weights = [1.0] * len(job.members)
        else:
            member_weights = [weight_of[member] for member in job.members]

        for begin, end in _chunks(job.start, job.stop, buffer):
            total = buffer[: end - begin].zero_()
            for member, weight in zip(job.members, member_weights, strict=True):
                if weight:  # a NaN times 0 is a NaN
                    total.add_(every_row[member][begin:end], alpha=weight)
            yield job, begin, end, total, sum(member_weights)


def _spread(
    rows: Sequence[Tensor], members: list[int], begin: int, end: int, total: Tensor, weight: float
) -> None:
    """Write total / weight into some columns of all members' rows, unless the weight is 0."""
    if members and weight > 0:
        mean = (total / weight).to(rows[members[0]].dtype)
        for member in members:
            rows[member][begin:end].copy_(mean)


def _chunks(start: int, stop: int, like: Tensor) -> Iterator[tuple[int, int]]:
    """Yield where every chunk of some columns begins and ends."""
    step = _step(like)
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)


def _step(like: Tensor) -> int:
    """Return how many columns to process at a time: what the caches of a CPU hold, or all."""
    return sys.maxsize if like.is_cuda else CHUNK * torch.get_num_threads()
