"""Merge slices of many widths into one row, and take them out of it (HeteroFL, section 3.2).

    merge   out[e] = sum_m a_m c_m[e] x_m[e] / sum_m a_m c_m[e];  uncovered, out[e] stays
    take    x_m[s] = row[e], s being the place of e in the client's row

c_m is 1 where client m's level covers the element and, in tensors whose rows are labels, where it
holds the label. The denominator follows from positions and metadata, so a merge that is split over
processes only sends the numerators: `slice_sum`, an all-reduce, `slice_finish_`. After a
reduce-scatter each process can finish its columns. Sums are float64, or exact 64-bit integers in
units of 2^-40 of the total weight ("fixed"). The bits do not depend on which process holds which
client. With float64 that requires whole weights, and addends of one element that span less than
about 2^18 in magnitude.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels._dispatch import backend, checking
from lightfed_kernels._rows import (
    Rows,
    as_list,
    check_one_device,
    check_row,
    check_rows,
    each_row,
    to_device,
)
from lightfed_kernels._slices_torch import finish_torch, merge_torch, sum_torch, take_torch
from lightfed_kernels.layout import ALIGNMENT
from lightfed_kernels.members import FIXED_LIMIT, Members, checked_levels
from lightfed_kernels.slices import SliceTable


def slice_merge_(out: Tensor, rows: Rows, members: Members, *, fixed: bool = False) -> Tensor:
    """The weighted mean of the clients' rows, in one launch; the rows of all clients are local.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.

    Args:
        out: (P,) of the target; uncovered elements keep their bits.
        rows: of all clients, in the order of `members`.
        members: the clients; those of weight 0 are skipped.
        fixed: sum exact integers; |values| must be below `FIXED_LIMIT`.

    Raises:
        ValueError, TypeError: a row that does not fit; names the argument.
    """
    if len(members.sizes) != members.clients:
        raise ValueError(
            f"members: {len(members.sizes)} of {members.clients} clients are local; "
            "slice_sum and slice_finish_ merge over processes"
        )
    sources = _sources(rows, members.sizes, members.order, fixed=fixed)
    table = members.table
    check_row("out", out, size=table.target.size)
    check_one_device(out=out, rows=sources, members=table.tensors)
    check_rows("rows", [out, *sources])
    weights = members.shares if fixed else members.weights
    tiles = table.tiles(out.dtype, members.widest[0])
    _merge(out, sources, *tiles, _tables(members), weights, fixed)
    return out


def slice_sum(rows: Rows, members: Members, *, fixed: bool = False) -> Tensor:
    """The local clients' share of the sum of a merge: (P,) float64, or int64 if `fixed`.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.
    """
    sources = _sources(rows, members.sizes, members.order, fixed=fixed)
    table = members.table
    check_one_device(rows=sources, members=table.tensors)
    dtype = torch.int64 if fixed else torch.float64
    partial = torch.zeros(table.target.size, dtype=dtype, device=table.device)
    if sources:
        weights = members.shares if fixed else members.weights
        tiles = table.tiles(sources[0].dtype, members.widest[1])
        _sum(partial, sources, *tiles, _tables(members), weights)
    return partial


def slice_finish_(out: Tensor, partial: Tensor, members: Members, start: int = 0) -> Tensor:
    """Write the mean into columns of `out` (P,), given the sums over the clients of all processes.

    Can be captured in a CUDA graph.

    Args:
        out: of the target; uncovered elements and other columns keep their bits.
        partial: (n,) columns of `slice_sum`, added up over the processes; n a multiple of 32.
        members: the same clients on every process.
        start: the first of the columns, a multiple of 32.
    """
    table = members.table
    check_row("out", out, size=table.target.size)
    if partial.dtype not in (torch.float64, torch.int64):
        raise TypeError(f"partial: {partial.dtype}; sums are torch.float64 or torch.int64")
    room = len(out) - start
    if partial.dim() != 1 or len(partial) > room or not partial.is_contiguous():
        raise ValueError(f"partial: {list(partial.shape)}; at most {room} in a contiguous vector")
    if start < 0 or start % ALIGNMENT or len(partial) % ALIGNMENT:
        raise ValueError(
            f"start: {len(partial)} columns from {start} on; both are multiples of {ALIGNMENT}"
        )
    check_one_device(out=out, partial=partial, members=table.tensors)
    tiles = table.tiles(out.dtype, members.widest[0])
    _finish(out, partial, start, *tiles, _tables(members))
    return out


def slice_take_(row: Tensor, outs: Rows, table: SliceTable, levels: Sequence[int]) -> None:
    """Copy the parts of `row` (P,) that clients' levels cover into their rows, in one launch.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.

    Args:
        row: of the target.
        outs: one row per client; elements without a counterpart in the target keep their bits.
        table: of the levels.
        levels: position of every client's level in the table's `sources`.

    Raises:
        ValueError, TypeError: a row that does not fit; names the argument.
    """
    ranks = [table.ranks[level] for level in checked_levels(levels, table)]
    order = sorted(range(len(ranks)), key=lambda i: ranks[i])
    sizes = [table.sources[level].size for level in levels]
    given = _sources(outs, sizes, order, name="outs")
    check_row("row", row, size=table.target.size)
    check_rows("outs", [row, *given])
    check_one_device(row=row, outs=given, table=table.tensors)
    if not given:
        return
    starts = np.searchsorted(sorted(ranks), range(len(table.ranks) + 1)).astype(np.int32)
    first = to_device(starts, table.device)
    tiles = table.tiles(row.dtype, min(ranks))
    _take(row, given, *tiles, table.tensors, table.levels, first)


def _sources(
    rows: Rows,
    sizes: Sequence[int],
    order: Sequence[int],
    *,
    fixed: bool = False,
    name: str = "rows",
) -> list[Tensor]:
    """The rows of participating clients, in the order of the tables; all rows are checked."""
    given = each_row(as_list(rows))
    if len(given) != len(sizes):
        raise ValueError(f"{name}: {len(given)} rows; {len(sizes)} clients are local")
    for position, (row, size) in enumerate(zip(given, sizes, strict=True)):
        check_row(f"{name}[{position}]", row, size=size)
    check_rows(name, given)
    if fixed and checking():
        for position in sorted(order):
            row = given[position]
            largest = float(row.abs().amax()) if row.numel() else 0.0
            if not largest < FIXED_LIMIT:
                raise ValueError(
                    f"{name}[{position}]: a value of magnitude {largest:g}; fixed-point sums need "
                    f"less than {FIXED_LIMIT:g}"
                )
    return [given[i] for i in order]


def _tables(members: Members) -> list[Tensor]:
    """The arguments of every merge operator after rows and tiles, in order."""
    table = members.table
    return [
        table.tensors,
        table.levels,
        members.first,
        members.levels_of,
        members.totals,
        members.label_words,
        members.label_totals,
    ]


@torch.library.custom_op("lightfed::slice_merge", mutates_args=("out",))
def _merge(
    out: Tensor,
    rows: Sequence[Tensor],
    flat: Tensor,
    rest: Tensor,
    tables: Sequence[Tensor],
    weights: Tensor,
    fixed: bool,
) -> None:
    if backend(out, *rows) == "triton":
        from lightfed_kernels.gpu.slices import merge

        merge("merge", out, out, rows, (flat, rest), tables, weights, fixed=fixed)
    else:
        merge_torch(out, rows, tables, weights, fixed=fixed)


@torch.library.custom_op("lightfed::slice_sum", mutates_args=("partial",))
def _sum(
    partial: Tensor,
    rows: Sequence[Tensor],
    flat: Tensor,
    rest: Tensor,
    tables: Sequence[Tensor],
    weights: Tensor,
) -> None:
    if backend(partial, *rows) == "triton":
        from lightfed_kernels.gpu.slices import merge

        fixed = partial.dtype == torch.int64
        merge("sum", rows[0], partial, rows, (flat, rest), tables, weights, fixed=fixed)
    else:
        sum_torch(partial, rows, tables, weights)


@torch.library.custom_op("lightfed::slice_finish", mutates_args=("out",))
def _finish(
    out: Tensor,
    partial: Tensor,
    start: int,
    flat: Tensor,
    rest: Tensor,
    tables: Sequence[Tensor],
) -> None:
    if backend(out, partial) == "triton":
        from lightfed_kernels.gpu.slices import merge

        tiles, fixed = (flat, rest), partial.dtype == torch.int64
        merge("finish", out, partial, (), tiles, tables, tables[4], fixed=fixed, start=start)
    else:
        finish_torch(out, partial, tables, start)


@torch.library.custom_op("lightfed::slice_take", mutates_args=("outs",))
def _take(
    row: Tensor,
    outs: Sequence[Tensor],
    flat: Tensor,
    rest: Tensor,
    tensors: Tensor,
    levels: Tensor,
    first: Tensor,
) -> None:
    if backend(row, *outs) == "triton":
        from lightfed_kernels.gpu.slices import take

        take(row, outs, (flat, rest), tensors, levels, first)
    else:
        take_torch(row, outs, tensors, levels, first)


for _operator in (_merge, _sum, _finish, _take):
    _operator.register_fake(lambda *arguments: None)
