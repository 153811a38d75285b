"""Sums over clients in plain torch, chunk by chunk on a CPU: the twin of the kernel in gpu.rows.

Sums are held in float64. A product of a float32 and a weight of few bits is exact there, and so is
the sum of products whose magnitudes are close: the order of the clients does not change it.
"""

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightfed_kernels._rows import each_row

# Elements that a core sums at a time: 1 MiB in float64. Every call of torch costs microseconds.
CHUNK = 131072


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
