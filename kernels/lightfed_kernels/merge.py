"""Merge slices of many widths into one row, and take them out of it (HeteroFL, section 3.2).

    merge   out[e] = sum_m a_m c_m[e] x_m[e] / sum_m a_m c_m[e];  if nobody covers e, out[e] stays
    take    x_m[s] = row[e], where s is the position of element e in the client's row

c_m[e] is 1 if the level of client m covers element e and, in tensors whose rows are labels, if the
client holds the label. The denominator follows from positions and metadata. So a merge that is
split over processes sends only the numerators: `slice_sum`, an all-reduce, `slice_finish_`. After a
reduce-scatter each process can finish its own columns. Sums are float64. The bits do not depend on
which process holds which client, if weights are whole numbers and the addends of one element differ
by a factor of less than about 2^18.
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

# Elements of a piece that is never cut: more than any row has.
_UNCUT = 2**62


def slice_merge_(out: Tensor, rows: Rows, members: Members) -> Tensor:
    """Write the weighted mean of the clients' rows, in one launch. All rows have to be local.

    It cannot be captured in a CUDA graph, because addresses of rows are copied from the host.

    Args:
        out: The row (P,) of the target; elements that no client covers keep their bits.
        rows: The rows of all clients, in the order of `members`.
        members: The clients; those of weight 0 are skipped.

    Returns:
        `out`.

    Raises:
        ValueError: A row does not fit; names the argument.
        TypeError: A row has an unsupported dtype, or not that of the others.
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
    """Return the local clients' share of the sum of a merge, as (P,) of float64.

    It cannot be captured in a CUDA graph, because addresses of rows are copied from the host.
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
    """Write the mean into columns of a row, given the sums over the clients of all processes.

    It can be captured in a CUDA graph.

    Args:
        out: The row (P,) of the target; uncovered elements and other columns keep their bits.
        partial: Columns (n,) of `slice_sum`, added up over the processes; n is a multiple of 32.
        members: The clients, the same ones on every process.
        start: The first of these columns, a multiple of 32.

    Returns:
        `out`.
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
    """Copy the parts of a row that clients' levels cover into the clients' rows, in one launch.

    It cannot be captured in a CUDA graph, because addresses of rows are copied from the host.

    Args:
        row: The row (P,) of the target.
        outs: One row per client; elements without a counterpart in the target keep their bits.
        table: The table of the levels.
        levels: The position of every client's level in the table's `sources`.

    Raises:
        ValueError: A row does not fit; names the argument.
        TypeError: A row has an unsupported dtype, or not that of the others.
    """
    ranks = [table.ranks[level] for level in checked_levels(levels, table)]
    order = sorted(range(len(ranks)), key=lambda i: ranks[i])
    sizes = [table.sources[level].size for level in levels]

    check_row("row", row, size=table.target.size)
    targets = _sources(outs, sizes, order, like=row, name="outs")
    check_one_device(row=row, outs=targets, table=table.tensors)
    if not targets:
        return

    starts = np.searchsorted(sorted(ranks), range(len(table.ranks) + 1)).astype(np.int32)
    first = to_device(starts, table.device)
    tiles = table.tiles(row.dtype, min(ranks))
    _take(row, targets, *tiles, table.tensors, table.levels, first)


def _sources(
    rows: Rows,
    sizes: Sequence[int],
    order: Sequence[int],
    *,
    like: Tensor | None = None,
    name: str = "rows",
) -> list[Tensor]:
    """Check the rows of the local clients, and bring them into the order of the tables.

    Args:
        rows: The rows, in the order in which the caller gives the clients.
        sizes: The length that each of them should have.
        order: The positions of the clients that take part, in the order of the tables.
        like: A tensor of the dtype that all rows should have; by default the first row.
        name: The name of the argument, for errors.

    Returns:
        The rows of the clients that take part.
    """
    given = each_row(as_list(rows))
    if len(given) != len(sizes):
        raise ValueError(f"{name}: {len(given)} rows; {len(sizes)} clients are local")
    if like is None and given:
        like = given[0]
    dtype = None if like is None else like.dtype
    for position, (row, size) in enumerate(zip(given, sizes, strict=True)):
        # Of a hundred rows, a call and a name for each take most of the time of a merge.
        is_alike = row.dtype == dtype and row.dim() == 1 and row.is_contiguous()
        if position > 0 and is_alike and row.shape[0] == size:
            continue
        check_row(f"{name}[{position}]", row, size=size, like=like)
    return [given[position] for position in order]


def _tables(members: Members) -> list[Tensor]:
    """Return the arguments of every merge operator after rows and tiles, in their order."""
    table = members.table
    return [
        table.tensors,
        table.levels,
        members.first,
        members.totals,
        members.label_words,
        members.label_totals,
    ]


# The torch path: tensors are cut into pieces, and each piece is added up client by client.


@dataclass(frozen=True, slots=True)
class _LevelPart:
    """The part of a piece that a level covers.

    Attributes:
        source: The offset of the tensor in a row of the level, and its axes a, b, c there.
        where: Which part of the piece it covers: () for all of it, None for nothing.
    """

    source: list[int]
    where: tuple[slice, ...] | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of one tensor of the target: some of the rows A and of the columns C.

    It has all columns, or lies in a single row. So it is contiguous in a row of the target.

    Attributes:
        begin: Where it begins in a row of the target.
        end: Where it ends there.
        shape: Its numbers of rows, of elements on the middle axis B, and of columns.
        single: Whether the tensor is a single row: A and B are 1.
        labelled: Whether the rows A are labels.
        first_row: Its first row.
        first_column: Its first column.
        end_column: The column behind its last.
        levels: What every level covers of it.
    """

    begin: int
    end: int
    shape: tuple[int, int, int]
    single: bool
    labelled: bool
    first_row: int
    first_column: int
    end_column: int
    levels: Sequence[_LevelPart]

    def of(self, row: Tensor) -> Tensor:
        """Return this piece of a row of the target, in its shape."""
        return row[self.begin : self.end].view(self.shape)

    def source(self, row: Tensor, source: list[int]) -> Tensor:
        """Return the elements of a client's row that lie in this piece.

        Args:
            row: The row of the client.
            source: Where the tensor lies in it: offset, a, b, c.
        """
        offset, a, b, c = source
        if self.single and a * b == 1:
            begin = offset + self.first_column
            end = offset + min(self.end_column, c)
            return row[begin:end].view(1, 1, -1)
        tensor = row[offset : offset + a * b * c].view(a, b, c)
        end_row = self.first_row + self.shape[0]
        return tensor[self.first_row : end_row, :, self.first_column : self.end_column]


def _pieces(tensors: Tensor, levels: Tensor, chunk: int) -> Iterator[_Piece]:
    """Cut all tensors of the target into pieces of about `chunk` elements, in their order.

    Args:
        tensors: (T, 5), as of SliceTable.
        levels: (L, T, 4), as of SliceTable.
        chunk: The number of elements.
    """
    sources_of_tensors = levels.transpose(0, 1).tolist()
    for (offset, a, b, c, labelled), sources in zip(
        tensors.tolist(), sources_of_tensors, strict=True
    ):
        if a * b * c == 0:
            continue

        # A single row is cut into pieces of about equal length. Other tensors are cut by whole
        # rows; one whose rows are labels is not, as labels count from its first row.
        columns = c
        if a * b == 1:
            pieces_of_row = -(-c // chunk)
            columns = -(-c // pieces_of_row)
        rows = a if labelled else max(1, chunk // (b * columns))

        for first_row in range(0, a, rows):
            for first_column in range(0, c, columns):
                shape = min(rows, a - first_row), b, min(columns, c - first_column)
                begin = offset + first_row * b * c + first_column
                yield _Piece(
                    begin=begin,
                    end=begin + prod(shape),
                    shape=shape,
                    single=a * b == 1,
                    labelled=bool(labelled),
                    first_row=first_row,
                    first_column=first_column,
                    end_column=first_column + shape[2],
                    levels=[_part(source, shape, first_row, first_column) for source in sources],
                )


def _part(
    source: list[int], shape: tuple[int, int, int], first_row: int, first_column: int
) -> _LevelPart:
    """Return the part of a piece that a level covers: its leading rows, B and columns."""
    _, a, b, c = source
    rows = min(a - first_row, shape[0])
    columns = min(c - first_column, shape[2])
    if (rows, b, columns) == shape:
        return _LevelPart(source, ())
    if rows <= 0 or b <= 0 or columns <= 0:
        return _LevelPart(source, None)
    return _LevelPart(source, (slice(0, rows), slice(0, b), slice(0, columns)))


def _chunk(device: torch.device) -> int:
    """Return the size of pieces; on an accelerator they would only add launches."""
    return CHUNK if device.type == "cpu" else _UNCUT


class _Local:
    """The local clients, by level.

    Args:
        rows: Their rows, in the order of the tables.
        first: (L + 1,) where the clients of every level begin.
        weights: (K,) the clients' weights.
        label_words: (K, words) the labels that they hold.
    """

    def __init__(
        self, rows: Sequence[Tensor], first: Tensor, weights: Tensor, label_words: Tensor
    ) -> None:
        self.label_words = label_words
        scales = weights.tolist()
        # Of every level, its clients: their position, row and weight.
        self.levels: list[list[tuple[int, Tensor, float]]] = []
        for begin, end in pairwise(first.tolist()):
            self.levels.append([(k, rows[k], scales[k]) for k in range(begin, end)])

    def add(self, piece: _Piece, sums: Tensor) -> None:
        """Add a_m x_m of every client m to the sums of a piece, wide levels first."""
        for level, clients in zip(piece.levels, self.levels, strict=True):
            if level.where is None or not clients:
                continue
            covered_sums = sums[level.where] if level.where else sums
            for k, row, scale in clients:
                values = piece.source(row, level.source)
                if piece.labelled:
                    labels = _label_index(self.label_words[k], covered_sums.shape[0])
                    addends = values.index_select(0, labels).double() * scale
                    covered_sums.index_add_(0, labels, addends)
                else:
                    covered_sums.add_(values, alpha=scale)


def _label_index(words: Tensor, rows: int) -> Tensor:
    """Return the labels of a client that are below `rows`, ascending."""
    bits = words[:, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return bits.flatten()[:rows].nonzero().flatten()


class _Counts:
    """The weight that covers an element, over the clients of all processes.

    Args:
        totals: (L,) the weights of all clients of a level.
        label_totals: (L, labels) the weights of all clients of a level that hold a label.
    """

    def __init__(self, totals: Tensor, label_totals: Tensor) -> None:
        self.totals = totals.tolist()
        self.label_totals = label_totals

    def covers(self, piece: _Piece) -> bool:
        """Whether any client covers a part of a piece."""
        for level, total in zip(piece.levels, self.totals, strict=True):
            if total > 0.0 and level.where is not None:
                return True
        return False

    def finish(self, piece: _Piece, sums: Tensor, out: Tensor) -> None:
        """Write sums / weight into `out` where at least one client covers the element."""
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
        """Return the weight of a piece, if it is known to be the same for all its elements."""
        if piece.labelled:
            return None
        weight = 0.0
        for level, total in zip(piece.levels, self.totals, strict=True):
            if level.where is None or total == 0.0:
                continue
            if level.where:
                return None  # the level covers only a part of the piece
            weight += total
        return weight

    def _weights(self, piece: _Piece, device: torch.device) -> Tensor:
        """Return the weight of every element of a piece, in the piece's shape."""
        weights = torch.zeros(piece.shape, dtype=torch.float64, device=device)
        for rank, (level, total) in enumerate(zip(piece.levels, self.totals, strict=True)):
            if level.where is None or total == 0.0:
                continue
            covered_weights = weights[level.where] if level.where else weights
            if piece.labelled:
                rows = covered_weights.shape[0]
                covered_weights += self.label_totals[rank, :rows, None, None]
            else:
                covered_weights += total
        return weights


# Custom operators, so that tools that record or compile a step see each merge as one. `flat` and
# `rest` are the tiles of SliceTable, and `tables` is what `_tables` returns.


@torch.library.custom_op("lightfed::slice_merge", mutates_args=("out",))
def _merge(
    out: Tensor,
    rows: Sequence[Tensor],
    flat: Tensor,
    rest: Tensor,
    tables: Sequence[Tensor],
    weights: Tensor,
) -> None:
    """Write the mean of `rows` into `out`."""
    if backend(out, *rows) == "triton":
        from lightfed_kernels.gpu.slices import merge

        merge("merge", out, out, rows, (flat, rest), tables, weights)
        return

    tensors, levels, first, totals, label_words, label_totals = tables
    local = _Local(rows, first, weights, label_words)
    counts = _Counts(totals, label_totals)
    # One buffer for the sums of all pieces, as large as the largest of them.
    buffer = torch.empty(0, dtype=torch.float64, device=out.device)
    for piece in _pieces(tensors, levels, _chunk(out.device)):
        if not counts.covers(piece):
            continue
        size = prod(piece.shape)
        if buffer.numel() < size:
            buffer.resize_(size)
        sums = buffer[:size].view(piece.shape).zero_()
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
    """Add the sum of `rows` to `partial`."""
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
    """Write the mean into columns of `out`, from their sums in `partial`."""
    if backend(out, partial) == "triton":
        from lightfed_kernels.gpu.slices import merge

        totals = tables[3]
        merge("finish", out, partial, (), (flat, rest), tables, totals, start=start)
        return

    tensors, levels, _, totals, _, label_totals = tables
    counts = _Counts(totals, label_totals)
    stop = start + len(partial)
    for piece in _pieces(tensors, levels, _chunk(out.device)):
        # The columns of the piece that `partial` has.
        first = max(piece.begin, start)
        last = min(piece.end, stop)
        if first >= last or not counts.covers(piece):
            continue

        sums = partial[first - start : last - start]
        if last - first == piece.end - piece.begin:
            counts.finish(piece, sums.view(piece.shape), piece.of(out))
            continue

        # Of a piece that `partial` has only in part, a copy is finished, and the part copied back.
        sums = F.pad(sums, (first - piece.begin, piece.end - last))
        mean = out[piece.begin : piece.end].clone()
        counts.finish(piece, sums.view(piece.shape), mean.view(piece.shape))
        out[first:last] = mean[first - piece.begin : last - piece.begin]


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
    """Copy parts of `row` into `outs`."""
    if backend(row, *outs) == "triton":
        from lightfed_kernels.gpu.slices import take

        take(row, outs, (flat, rest), tensors, levels, first)
        return

    starts = first.tolist()
    present = [level for level in range(len(starts) - 1) if starts[level] < starts[level + 1]]
    # With one client every element is read once, so whole tensors are copied.
    chunk = _chunk(row.device) if len(outs) > 1 else _UNCUT
    for piece in _pieces(tensors, levels[present], chunk):
        values_of_piece = piece.of(row)
        for level, part in zip(present, piece.levels, strict=True):
            if part.where is None:
                continue
            values = values_of_piece[part.where] if part.where else values_of_piece
            for out in outs[starts[level] : starts[level + 1]]:
                piece.source(out, part.source).copy_(values)


# With tracing tools these operators run on tensors without values; they return nothing.
for _operator in (_merge, _sum, _finish, _take):
    _operator.register_fake(lambda *arguments: None)
