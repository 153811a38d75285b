"""Means of tensors over the clients that have them in common, on flat rows (FlexiFed).

    x_k[T] <- sum_u a_u x_u[T] / sum_u a_u        k, u in U, the clients that have the tensors T

A shared tensor is in different columns of each group's rows, and in a row all buffers come after
all parameters. So shared tensors are cut into runs: ranges of columns that are contiguous in every
group. All runs take one launch, and on several ranks one packed all-reduce.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from lightfed_kernels import Groups, Layout, grouped_spread_, grouped_sum
from torch import Tensor

from lightfed.distributed.collectives import Ranks
from lightfed.state.rows import ModelLayout, Row


@dataclass(frozen=True)
class SharedTensors:
    """Tensors that the clients of some groups have in common.

    Attributes:
        names: Group -> the names of the tensors in that group. The i-th name of every group is the
            same tensor.
    """

    names: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True)
class Run:
    """A range of columns of shared tensors, with the padding between them.

    Attributes:
        members: All clients that have the tensors, ascending.
        starts: Group -> the first column of the run in the group's rows.
        length: Number of columns.
    """

    members: tuple[int, ...]
    starts: Mapping[int, int]
    length: int


class GroupMeans:
    """What the participants of a round share, laid out on their rows.

    Tensors of a single participant are skipped: nothing is averaged or sent.

    Args:
        shared: Disjoint sets of tensors.
        layouts: The layout of every group.
        groups: The group of every participant, on any rank.
    """

    def __init__(
        self,
        shared: Sequence[SharedTensors],
        layouts: Sequence[ModelLayout],
        groups: Mapping[int, int],
    ) -> None:
        self._groups = dict(groups)
        self._bytes = dict.fromkeys(groups, 0)
        self._float_runs: list[Run] = []
        self._integer_runs: list[Run] = []

        float_layouts = [layout.floats for layout in layouts]
        integer_layouts = [layout.integers for layout in layouts]
        for tensors in shared:
            members = tuple(sorted(k for k, group in groups.items() if group in tensors.names))
            if len(members) < 2:
                continue

            groups_of_members = sorted({groups[k] for k in members})
            names = {group: tensors.names[group] for group in groups_of_members}
            self._float_runs += _runs(members, names, float_layouts)
            self._integer_runs += _runs(members, names, integer_layouts)

            # The tensors have the same sizes in every group, so any member will do.
            any_group = groups[members[0]]
            size = _bytes(layouts[any_group], names[any_group])
            for k in members:
                self._bytes[k] += size

    def bytes(self, client: int) -> int:
        """Return the bytes of the tensors that a participant shares: 4 a float, 8 an integer."""
        return self._bytes[client]

    def mean_(
        self,
        rows: Mapping[int, Row],
        *,
        weights: Mapping[int, float],
        ranks: Ranks,
    ) -> None:
        """Replace shared tensors by their means, and integers (counts of batches) by the maximum.

        Sums do not depend on order (see `lightfed.aggregation.coverage`), so any number of ranks
        gives equal bits. Tensors to which no client contributes are unchanged.

        Args:
            rows: The rows of this rank's participants, all on the device or all in host memory.
            weights: a_u of the participants that contribute, on all ranks. The others only receive.
            ranks: The ranks of the run.
        """
        if self._float_runs:
            self._mean_floats(rows, weights, ranks)
        if self._integer_runs:
            self._largest_integers(rows, weights, ranks)

    def _mean_floats(
        self, rows: Mapping[int, Row], weights: Mapping[int, float], ranks: Ranks
    ) -> None:
        """Replace floats by their weighted means."""
        floats = {k: row.floats for k, row in rows.items()}

        # The kernel reads a flat list of pieces: of each run, its columns in the rows of this rank.
        # A job names the pieces of one run by their positions in that list.
        pieces: list[Tensor] = []
        piece_weights: list[float] = []
        jobs = []
        weight_sums = []
        for run in self._float_runs:
            first = len(pieces)
            for k, piece in self._pieces(run, floats).items():
                pieces.append(piece)
                piece_weights.append(weights.get(k, 0.0))
            jobs.append((range(first, len(pieces)), 0, run.length))
            weight_sums.append(sum(weights.get(k, 0.0) for k in run.members))

        # A rank without participants still takes part in the sum over ranks.
        device = pieces[0].device if pieces else ranks.device
        groups = Groups.build(jobs, [len(piece) for piece in pieces], device=device)
        sums = sum_over_ranks(grouped_sum(pieces, groups, piece_weights), ranks)
        grouped_spread_(pieces, sums, groups, weight_sums)

    def _largest_integers(
        self, rows: Mapping[int, Row], contributors: Collection[int], ranks: Ranks
    ) -> None:
        """Replace integers by the largest of the contributors'."""
        integers = {k: row.integers for k, row in rows.items()}
        pieces_of_runs = [self._pieces(run, integers) for run in self._integer_runs]

        # All runs back to back, so that one collective does for all of them.
        lengths = [run.length for run in self._integer_runs]
        smallest = torch.iinfo(torch.int64).min  # loses against what another rank has
        packed = torch.full((sum(lengths),), smallest, dtype=torch.int64, device=ranks.device)
        largest_of_runs = packed.split(lengths)  # views
        for pieces, largest in zip(pieces_of_runs, largest_of_runs, strict=True):
            for k, piece in pieces.items():
                if k in contributors:
                    torch.maximum(largest, piece.to(largest.device), out=largest)
        ranks.max_(packed)

        for run, pieces, largest in zip(
            self._integer_runs, pieces_of_runs, largest_of_runs, strict=True
        ):
            if any(k in contributors for k in run.members):
                for piece in pieces.values():
                    piece.copy_(largest)

    def _pieces(self, run: Run, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the run's columns in the rows of its members on this rank, as views."""
        pieces = {}
        for k in run.members:
            if k in rows:
                start = run.starts[self._groups[k]]
                pieces[k] = rows[k][start : start + run.length]
        return pieces


def sum_over_ranks(sums: Tensor, ranks: Ranks) -> Tensor:
    """Sum a tensor in place over the ranks, via the device if it is in host memory."""
    if ranks.world == 1:
        return sums
    return sums.copy_(ranks.sum_(sums.to(ranks.device)))


def _bytes(layout: ModelLayout, names: Sequence[str]) -> int:
    """Return the bytes of some tensors of a layout."""
    chosen = set(names)
    return 4 * layout.floats.only(chosen).numel + 8 * layout.integers.only(chosen).numel


def _runs(
    members: tuple[int, ...], names: Mapping[int, Sequence[str]], layouts: Sequence[Layout]
) -> Iterator[Run]:
    """Yield the runs of tensors, joined where the tensors are adjacent in all groups.

    Args:
        members: The clients that have the tensors.
        names: Group -> the names of the tensors; those that its layout lacks are skipped.
        layouts: The layout of every group.
    """
    groups = list(names)
    columns_by_group = [list(_columns(layouts[group], names[group])) for group in groups]

    starts: list[int] = []  # of the run that grows, in the order of `groups`
    length = 0
    # One step is one tensor: its columns in every group. The order is that of the first group.
    for columns in sorted(zip(*columns_by_group, strict=True)):
        shapes = {in_group.shape for in_group in columns}
        assert len(shapes) == 1, f"tensors of unlike shapes: {shapes}"

        is_adjacent = [in_group.start for in_group in columns] == [at + length for at in starts]
        if not is_adjacent:
            if length > 0:
                yield Run(members, dict(zip(groups, starts, strict=True)), length)
            starts = [in_group.start for in_group in columns]
            length = 0
        length += columns[0].length

    if length > 0:
        yield Run(members, dict(zip(groups, starts, strict=True)), length)


class _Columns(NamedTuple):
    """Where a tensor is in the rows of a group.

    Attributes:
        start: Its first column.
        length: Its columns with the padding behind it.
        shape: Its shape.
    """

    start: int
    length: int
    shape: tuple[int, ...]


def _columns(layout: Layout, names: Sequence[str]) -> Iterator[_Columns]:
    """Yield the columns of the named tensors that the layout has, in the order of the names."""
    position_of = {entry.name: position for position, entry in enumerate(layout)}
    for name in names:
        if name in position_of:
            position = position_of[name]
            entry = layout.entries[position]
            stop = layout.span(position + 1)
            yield _Columns(entry.offset, stop - entry.offset, entry.shape)
