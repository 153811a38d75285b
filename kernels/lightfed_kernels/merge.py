"""Merge slices of many widths into one row, and take them out of it (HeteroFL, section 3.2).

    merge   out[e] = sum_m a_m c_m[e] x_m[e] / sum_m a_m c_m[e];  uncovered, out[e] stays
    take    x_m[s] = row[e], s being the place of e in the client's row

c_m is 1 where client m's level covers the element and, in tensors whose rows are labels, where it
holds the label. The denominator follows from positions and metadata, so a merge that is split over
processes only sends the numerators: `slice_sum`, an all-reduce, `slice_finish_`. After a
reduce-scatter each process can finish its columns. Sums are float64. The bits do not depend on
which process holds which client, if weights are whole and the addends of one element span less than
about 2^18 in magnitude.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightfed_kernels._rows import (
    Rows,
    as_list,
    backend,
    check_one_device,
    check_row,
    each_row,
    to_device,
)
from lightfed_kernels.layout import ALIGNMENT
from lightfed_kernels.slices import Members, SliceTable, checked_levels

# Elements of a piece on a CPU: 1 MiB of float64 sums, which stay in its cache.
CHUNK = 131072


def slice_merge_(out: Tensor, rows: Rows, members: Members) -> Tensor:
    """The weighted mean of the clients' rows, in one launch; the rows of all clients are local.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.

    Args:
        out: (P,) of the target; uncovered elements keep their bits.
        rows: of all clients, in the order of `members`.
        members: the clients; those of weight 0 are skipped.

    Raises:
        ValueError, TypeError: a row that does not fit; names the argument.
    """
    if len(members.sizes) != members.clients:
        raise ValueError(
            f"members: {len(members.sizes)} of {members.clients} clients are local; "
            "slice_sum and slice_finish_ merge over processes"
        )
    table = members.table
    check_row("out", out, size=table.target.size)
    sources = _sources(rows, members.sizes, members.order, like=out)
    check_one_device(out=out, rows=sources, members=table.tensors)
    tiles = table.tiles(out.dtype, members.widest[0])
    _merge(out, sources, *tiles, _tables(members), members.weights)
    return out


def slice_sum(rows: Rows, members: Members) -> Tensor:
    """The local clients' share of the sum of a merge: (P,) float64.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.
    """
    sources = _sources(rows, members.sizes, members.order)
    table = members.table
    check_one_device(rows=sources, members=table.tensors)
    partial = torch.zeros(table.target.size, dtype=torch.float64, device=table.device)
    if sources:
        tiles = table.tiles(sources[0].dtype, members.widest[1])
        _sum(partial, sources, *tiles, _tables(members), members.weights)
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
    if partial.dtype != torch.float64:
        raise TypeError(f"partial: {partial.dtype}; sums are torch.float64")
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
    check_row("row", row, size=table.target.size)
    given = _sources(outs, sizes, order, like=row, name="outs")
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
    like: Tensor | None = None,
    name: str = "rows",
) -> list[Tensor]:
    """The rows of participating clients, in the order of the tables.

    All rows are checked; they have the dtype of `like`, or of the first.
    """
    given = each_row(as_list(rows))
    if len(given) != len(sizes):
        raise ValueError(f"{name}: {len(given)} rows; {len(sizes)} clients are local")
    for position, (row, size) in enumerate(zip(given, sizes, strict=True)):
        check_row(f"{name}[{position}]", row, size=size, like=given[0] if like is None else like)
    return [given[i] for i in order]


def _tables(members: Members) -> list[Tensor]:
    """The arguments of every merge operator after rows and tiles, in order."""
    table = members.table
    return [
        table.tensors,
        table.levels,
        members.first,
        members.totals,
        members.label_words,
        members.label_totals,
    ]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of one tensor: rows from a0 and columns [c0, c1) of its axes (A, B, C).

    It has all columns or lies in a single row, so it is contiguous in a row of the target.

    Attributes:
        begin, end: its place in a row of the target.
        shape: (rows, B, columns).
        single: whether A and B are 1.
        labelled: whether its rows are labels.
        levels: of every level offset, a, b, c, and the part of the piece that it covers: () for
            all, None for nothing.
    """

    begin: int
    end: int
    shape: tuple[int, int, int]
    single: bool
    labelled: bool
    a0: int
    c0: int
    c1: int
    levels: Sequence[tuple[list[int], tuple[slice, ...] | None]]

    def of(self, row: Tensor) -> Tensor:
        """This part of a row of the target."""
        return row[self.begin : self.end].view(self.shape)

    def source(self, row: Tensor, source: list[int]) -> Tensor:
        """The elements of a client's row in this part."""
        offset, a, b, c = source
        if self.single and a * b == 1:
            return row[offset + self.c0 : offset + min(self.c1, c)].view(1, 1, -1)
        view = row[offset : offset + a * b * c].view(a, b, c)
        return view[self.a0 : self.a0 + self.shape[0], :, self.c0 : self.c1]


def _pieces(tensors: Tensor, levels: Tensor, chunk: int) -> Iterator[_Piece]:
    sources = levels.transpose(0, 1).tolist()
    for (offset, a, b, c, labelled), own in zip(tensors.tolist(), sources, strict=True):
        if a * b * c == 0:
            continue
        # One row: pieces of equal length.
        columns = -(-c // -(-c // chunk)) if a * b == 1 else c
        rows = a if labelled else max(1, chunk // (b * columns))
        for a0 in range(0, a, rows):
            for c0 in range(0, c, columns):
                shape = min(rows, a - a0), b, min(columns, c - c0)
                covered: list[tuple[list[int], tuple[slice, ...] | None]] = []
                for source in own:
                    top, left = min(source[1] - a0, shape[0]), min(source[3] - c0, shape[2])
                    part = (slice(0, top), slice(0, source[2]), slice(0, left))
                    whole = (top, source[2], left) == shape
                    some = top > 0 and source[2] > 0 and left > 0
                    covered.append((source, () if whole else part if some else None))
                at, one = offset + a0 * b * c + c0, a * b == 1
                end, c1 = at + prod(shape), c0 + shape[2]
                yield _Piece(at, end, shape, one, bool(labelled), a0, c0, c1, covered)


def _chunk(device: torch.device) -> int:
    """On an accelerator, pieces would only add launches."""
    return CHUNK if device.type == "cpu" else 2**62


class _Local:
    """The local clients, by level."""

    def __init__(
        self, rows: Sequence[Tensor], first: Tensor, weights: Tensor, label_words: Tensor
    ) -> None:
        starts, scales = first.tolist(), weights.tolist()
        self.label_words = label_words
        self.levels = [
            [(k, rows[k], scales[k]) for k in range(begin, end)] for begin, end in pairwise(starts)
        ]

    def add(self, piece: _Piece, sums: Tensor) -> None:
        """Add a_m x_m of every client m, wide levels first."""
        for (source, where), clients in zip(piece.levels, self.levels, strict=True):
            if where is None or not clients:
                continue
            part = sums[where] if where else sums
            for k, row, scale in clients:
                values = piece.source(row, source)
                if piece.labelled:
                    index = _label_index(self.label_words[k], part.shape[0])
                    part.index_add_(0, index, values.index_select(0, index).double() * scale)
                else:
                    part.add_(values, alpha=scale)


def _label_index(words: Tensor, rows: int) -> Tensor:
    """The labels of a client below a bound, ascending."""
    bits = words[:, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return bits.flatten()[:rows].nonzero().flatten()


class _Counts:
    """The weight that covers an element, of the clients of all processes."""

    def __init__(self, totals: Tensor, label_totals: Tensor) -> None:
        self.totals, self.label_totals = totals.tolist(), label_totals

    def covers(self, piece: _Piece) -> bool:
        return any(
            total > 0.0 and where is not None
            for (_, where), total in zip(piece.levels, self.totals, strict=True)
        )

    def finish(self, piece: _Piece, sums: Tensor, out: Tensor) -> None:
        """Out = sums / weight where at least one client covers."""
        weight = self._uniform(piece)
        if weight is not None:
            out.copy_(sums / weight)
            return
        weights = self._weights(piece, out.device)
        if bool((weights > 0).all()):
            out.copy_(sums / weights)
            return
        covered = weights > 0
        mean = sums / weights.masked_fill_(~covered, 1.0)
        out.copy_(torch.where(covered, mean.to(out.dtype), out))

    def _uniform(self, piece: _Piece) -> float | None:
        """The weight of a piece, if it is the same for all its elements."""
        if piece.labelled:
            return None
        weight = 0.0
        for (_, where), total in zip(piece.levels, self.totals, strict=True):
            if where is not None and total > 0.0:
                if where:
                    return None
                weight += total
        return weight

    def _weights(self, piece: _Piece, device: torch.device) -> Tensor:
        weights = torch.zeros(piece.shape, dtype=torch.float64, device=device)
        each = zip(piece.levels, self.totals, strict=True)
        for level, ((_, where), total) in enumerate(each):
            if where is None or total == 0.0:
                continue
            part = weights[where] if where else weights
            if piece.labelled:
                part += self.label_totals[level, : part.shape[0], None, None]
            else:
                part += total
        return weights


@torch.library.custom_op("lightfed::slice_merge", mutates_args=("out",))
def _merge(
    out: Tensor,
    rows: Sequence[Tensor],
    flat: Tensor,
    rest: Tensor,
    tables: Sequence[Tensor],
    weights: Tensor,
) -> None:
    if backend(out, *rows) == "triton":
        from lightfed_kernels.gpu.slices import merge

        merge("merge", out, out, rows, (flat, rest), tables, weights)
        return
    tensors, levels, first, totals, label_words, label_totals = tables
    local = _Local(rows, first, weights, label_words)
    counts = _Counts(totals, label_totals)
    scratch = torch.empty(0, dtype=torch.float64, device=out.device)
    for piece in _pieces(tensors, levels, _chunk(out.device)):
        if not counts.covers(piece):
            continue
        size = prod(piece.shape)
        if scratch.numel() < size:
            scratch.resize_(size)
        sums = scratch[:size].view(piece.shape).zero_()
        local.add(piece, sums)
        counts.finish(piece, sums, piece.of(out))


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

        merge("sum", rows[0], partial, rows, (flat, rest), tables, weights)
        return
    tensors, levels, first, _, label_words, _ = tables
    local = _Local(rows, first, weights, label_words)
    for piece in _pieces(tensors, levels, _chunk(partial.device)):
        local.add(piece, piece.of(partial))


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

        merge("finish", out, partial, (), (flat, rest), tables, tables[3], start=start)
        return
    tensors, levels, _, totals, _, label_totals = tables
    counts, stop = _Counts(totals, label_totals), start + len(partial)
    for piece in _pieces(tensors, levels, _chunk(out.device)):
        begin, end = piece.begin, piece.end
        first, last = max(begin, start), min(end, stop)
        if first >= last or not counts.covers(piece):
            continue
        sums, mean = partial[first - start : last - start], out[begin:end]
        if last - first < end - begin:  # the piece is finished on a copy
            sums, mean = F.pad(sums, (first - begin, end - last)), mean.clone()
        counts.finish(piece, sums.view(piece.shape), mean.view(piece.shape))
        if last - first < end - begin:
            out[first:last] = mean[first - begin : last - begin]


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
        return
    starts = first.tolist()
    present = [level for level in range(len(starts) - 1) if starts[level] < starts[level + 1]]
    # With one client every element is read once, so whole tensors are copied.
    chunk = _chunk(row.device) if len(outs) > 1 else 2**62
    used = levels[present]
    for piece in _pieces(tensors, used, chunk):
        whole = piece.of(row)
        for level, (source, where) in zip(present, piece.levels, strict=True):
            if where is not None:
                values = whole[where] if where else whole
                for out in outs[starts[level] : starts[level + 1]]:
                    piece.source(out, source).copy_(values)


for _operator in (_merge, _sum, _finish, _take):
    _operator.register_fake(lambda *arguments: None)
