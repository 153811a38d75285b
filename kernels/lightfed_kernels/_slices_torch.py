"""The torch path of the slice operations, on views, in pieces that stay in a CPU's cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of a piece: 1 MiB of float64 sums, so that Python's overhead is small.
CHUNK = 131072


@dataclass(frozen=True)
class _Piece:
    """A part of one tensor: rows [a0, a1) and columns [c0, c1) of its axes (A, B, C).

    It has all columns or lies in a single row, so it is contiguous in a row of the target.
    """

    offset: int
    axes: tuple[int, int, int]
    labelled: bool
    a0: int
    a1: int
    c0: int
    c1: int
    sources: list[list[int]]  # of every level: offset, a, b, c

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.a1 - self.a0, self.axes[1], self.c1 - self.c0

    @property
    def columns(self) -> tuple[int, int]:
        """Where it begins and ends in a row of the target."""
        _, b, c = self.axes
        begin = self.offset + self.a0 * b * c + self.c0
        return begin, begin + prod(self.shape)

    def of(self, row: Tensor) -> Tensor:
        """This part of a row of the target."""
        begin, end = self.columns
        return row[begin:end].view(self.shape)

    def covered(self, source: list[int]) -> tuple[slice, ...] | None:
        """The part that a level covers, relative to the piece; None for nothing, () for all."""
        _, a, b, c = source
        if a >= self.a1 and b == self.axes[1] and c >= self.c1:
            return ()
        a, c = min(a, self.a1) - self.a0, min(c, self.c1) - self.c0
        return (slice(0, a), slice(0, b), slice(0, c)) if a > 0 and b > 0 and c > 0 else None

    def source(self, row: Tensor, source: list[int]) -> Tensor:
        """The elements of a client's row in this part."""
        offset, a, b, c = source
        if a * b == 1 and self.axes[0] * self.axes[1] == 1:
            return row[offset + self.c0 : offset + min(self.c1, c)].view(1, 1, -1)
        view = row[offset : offset + a * b * c].view(a, b, c)
        return view[self.a0 : self.a1, :, self.c0 : self.c1]


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
                a1, c1 = min(a0 + rows, a), min(c0 + columns, c)
                yield _Piece(offset, (a, b, c), bool(labelled), a0, a1, c0, c1, own)


def _chunk(device: torch.device) -> int:
    """On an accelerator, pieces would only add launches."""
    return CHUNK if device.type == "cpu" else 2**62


def merge_torch(
    out: Tensor,
    rows: Sequence[Tensor],
    tables: Sequence[Tensor],
    weights: Tensor,
    *,
    fixed: bool,
) -> None:
    """Takes the operator's arguments, as do the functions below."""
    tensors, levels, first, _, totals, label_words, label_totals = tables
    local = _Local(rows, first, weights, label_words)
    counts = _Counts(totals, label_totals)
    scratch = torch.empty(0, dtype=torch.int64 if fixed else torch.float64, device=out.device)
    for piece in _pieces(tensors, levels, _chunk(out.device)):
        if not counts.covers(piece):
            continue
        size = prod(piece.shape)
        if scratch.numel() < size:
            scratch.resize_(size)
        sums = scratch[:size].view(piece.shape).zero_()
        local.add(piece, sums)
        counts.finish(piece, sums, piece.of(out))


def sum_torch(
    partial: Tensor, rows: Sequence[Tensor], tables: Sequence[Tensor], weights: Tensor
) -> None:
    tensors, levels, first, _, _, label_words, _ = tables
    local = _Local(rows, first, weights, label_words)
    for piece in _pieces(tensors, levels, _chunk(partial.device)):
        local.add(piece, piece.of(partial))


def finish_torch(out: Tensor, partial: Tensor, tables: Sequence[Tensor], start: int) -> None:
    tensors, levels, _, _, totals, _, label_totals = tables
    counts, stop = _Counts(totals, label_totals), start + len(partial)
    for piece in _pieces(tensors, levels, _chunk(out.device)):
        begin, end = piece.columns
        first, last = max(begin, start), min(end, stop)
        if first >= last or not counts.covers(piece):
            continue
        sums, mean = partial[first - start : last - start], out[begin:end]
        if last - first < end - begin:  # the piece is finished on a copy
            sums, mean = F.pad(sums, (first - begin, end - last)), mean.clone()
        counts.finish(piece, sums.view(piece.shape), mean.view(piece.shape))
        if last - first < end - begin:
            out[first:last] = mean[first - begin : last - begin]


def take_torch(
    row: Tensor, outs: Sequence[Tensor], tensors: Tensor, levels: Tensor, first: Tensor
) -> None:
    starts = first.tolist()
    present = [level for level in range(len(starts) - 1) if starts[level] < starts[level + 1]]
    # With one client every element is read once, so whole tensors are copied.
    chunk = _chunk(row.device) if len(outs) > 1 else 2**62
    used = levels[present]
    for piece in _pieces(tensors, used, chunk):
        for level, source in zip(present, piece.sources, strict=True):
            where = piece.covered(source)
            if where is not None:
                values = piece.of(row)[where] if where else piece.of(row)
                for out in outs[starts[level] : starts[level + 1]]:
                    piece.source(out, source).copy_(values)


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
        for source, clients in zip(piece.sources, self.levels, strict=True):
            where = piece.covered(source)
            if where is None or not clients:
                continue
            part = sums[where] if where else sums
            for k, row, scale in clients:
                values = piece.source(row, source)
                if piece.labelled:
                    index = _label_index(self.label_words[k], part.shape[0])
                    part.index_add_(0, index, _scaled(values.index_select(0, index), scale, part))
                elif part.dtype == torch.int64:
                    part.add_(_scaled(values, scale, part))
                else:
                    part.add_(values, alpha=scale)


def _scaled(values: Tensor, scale: float, like: Tensor) -> Tensor:
    scaled = values.double() * scale
    return scaled.round_().to(torch.int64) if like.dtype == torch.int64 else scaled


def _label_index(words: Tensor, rows: int) -> Tensor:
    """The labels of a client below a bound, ascending."""
    bits = words[:, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return bits.flatten()[:rows].nonzero().flatten()


class _Counts:
    """The weight that covers an element, of the clients of all processes."""

    def __init__(self, totals: Tensor, label_totals: Tensor) -> None:
        *self.totals, self.unit = totals.tolist()
        self.label_totals = label_totals

    def covers(self, piece: _Piece) -> bool:
        return any(
            total > 0.0 and piece.covered(source) is not None
            for source, total in zip(piece.sources, self.totals, strict=True)
        )

    def finish(self, piece: _Piece, sums: Tensor, out: Tensor) -> None:
        """Out = sums / weight where at least one client covers."""
        mean = sums.double() * self.unit if sums.dtype == torch.int64 else sums
        weight = self._uniform(piece)
        if weight is not None:
            out.copy_(mean.div_(weight) if mean is not sums else mean / weight)
            return
        weights = self._weights(piece, out.device)
        if bool((weights > 0).all()):
            out.copy_(mean / weights)
            return
        covered = weights > 0
        mean = mean / weights.masked_fill_(~covered, 1.0)
        out.copy_(torch.where(covered, mean.to(out.dtype), out))

    def _uniform(self, piece: _Piece) -> float | None:
        """The weight of a piece, if it is the same for all its elements."""
        if piece.labelled:
            return None
        weight = 0.0
        for source, total in zip(piece.sources, self.totals, strict=True):
            where = piece.covered(source)
            if where is not None and total > 0.0:
                if where:
                    return None
                weight += total
        return weight

    def _weights(self, piece: _Piece, device: torch.device) -> Tensor:
        weights = torch.zeros(piece.shape, dtype=torch.float64, device=device)
        for level, (source, total) in enumerate(zip(piece.sources, self.totals, strict=True)):
            where = piece.covered(source)
            if where is None or total == 0.0:
                continue
            part = weights[where] if where else weights
            if piece.labelled:
                part += self.label_totals[level, : part.shape[0], None, None]
            else:
                part += total
        return weights
