"""Means of tensors over the clients that have them in common, on flat rows (FlexiFed).

    x_k[T] <- sum_u a_u x_u[T] / sum_u a_u        k, u in U, the clients that have the tensors T

Shared tensors are in different columns of each client group's rows, and buffers come after all
parameters. So they are cut into runs: ranges of columns that are contiguous in every group. All
runs take one launch, and on several ranks one packed all-reduce.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from lightfed_kernels import Groups, Layout, grouped_spread_, grouped_sum
from torch import Tensor

from lightfed.distributed.collectives import Ranks
from lightfed.state.rows import ModelLayout, Row


@dataclass(frozen=True)
class SharedTensors:
    """Tensors that the clients of some groups have in common, by their names in each group.

    The i-th name of every group is the same tensor.
    """

    names: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True)
class Run:
    """Contiguous columns of shared tensors, with padding between them.

    `members` are all clients that have them, ascending; `starts` gives the first column in a
    group's rows.
    """

    members: tuple[int, ...]
    starts: Mapping[int, int]
    length: int


class GroupMeans:
    """What is shared in a round, laid out on the rows of its participants.

    Tensors of a single participant are skipped: nothing is averaged or sent. `shared` are disjoint
    sets of tensors; `groups` gives that of every participant, on any rank.
    """

    def __init__(
        self,
        shared: Sequence[SharedTensors],
        layouts: Sequence[ModelLayout],
        groups: Mapping[int, int],
    ) -> None:
        self._groups = dict(groups)
        self._bytes = dict.fromkeys(groups, 0)
        self._floats: list[Run] = []
        self._integers: list[Run] = []
        floats, integers = [x.floats for x in layouts], [x.integers for x in layouts]
        for part in shared:
            members = tuple(sorted(k for k, group in groups.items() if group in part.names))
            if len(members) < 2:
                continue
            names = {group: part.names[group] for group in sorted({groups[k] for k in members})}
            self._floats += _runs(members, names, floats)
            self._integers += _runs(members, names, integers)
            sample = layouts[groups[members[0]]]
            own = set(names[groups[members[0]]])
            size = 4 * sample.floats.only(own).numel + 8 * sample.integers.only(own).numel
            for k in members:
                self._bytes[k] += size

    def bytes(self, client: int) -> int:
        """Bytes of the tensors that a participant shares: 4 per float, 8 per integer."""
        return self._bytes[client]

    def mean_(
        self,
        rows: Mapping[int, Row],
        *,
        weights: Mapping[int, float],
        ranks: Ranks,
    ) -> None:
        """Replace tensors by their means, and integers (counts of batches) by the maximum.

        Sums do not depend on order (see `coverage`), so any number of ranks gives equal bits.
        The rows of this rank's participants are all on the device or all in host memory. `weights`
        a_u are those of the contributing participants, on all ranks; the others only receive.
        Tensors without contributors are unchanged.
        """
        if self._floats:
            self._mean_floats(rows, weights, ranks)
        if self._integers:
            self._largest_integers(rows, weights, ranks)

    def _mean_floats(
        self, rows: Mapping[int, Row], weights: Mapping[int, float], ranks: Ranks
    ) -> None:
        parts = [
            self._parts(run, {k: row.floats for k, row in rows.items()}) for run in self._floats
        ]
        totals = [sum(weights.get(k, 0.0) for k in run.members) for run in self._floats]
        pieces = [piece for part in parts for piece in part.values()]
        place = pieces[0].device if pieces else ranks.device
        jobs, first = [], 0
        for run, part in zip(self._floats, parts, strict=True):
            jobs.append((range(first, first + len(part)), 0, run.length))
            first += len(part)
        groups = Groups.build(jobs, [len(piece) for piece in pieces], device=place)
        shares = [weights.get(k, 0.0) for part in parts for k in part]
        grouped_spread_(pieces, _sum(grouped_sum(pieces, groups, shares), ranks), groups, totals)

    def _largest_integers(
        self, rows: Mapping[int, Row], givers: Collection[int], ranks: Ranks
    ) -> None:
        columns = sum(run.length for run in self._integers)
        least = torch.iinfo(torch.int64).min
        packed = torch.full((columns,), least, dtype=torch.int64, device=ranks.device)
        integers = {k: row.integers for k, row in rows.items()}
        parts = [self._parts(run, integers) for run in self._integers]
        for part, out in zip(parts, self._cut(packed, self._integers), strict=True):
            for k, piece in part.items():
                if k in givers:
                    torch.maximum(out, piece.to(out.device), out=out)
        ranks.max_(packed)
        for run, part, out in zip(
            self._integers, parts, self._cut(packed, self._integers), strict=True
        ):
            for piece in part.values() if any(k in givers for k in run.members) else ():
                piece.copy_(out)

    def _parts(self, run: Run, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Views of a run's columns in the rows of its members on this rank."""
        starts = {k: run.starts[self._groups[k]] for k in run.members if k in rows}
        return {k: rows[k][start : start + run.length] for k, start in starts.items()}

    @staticmethod
    def _cut(packed: Tensor, runs: Sequence[Run]) -> tuple[Tensor, ...]:
        """Views of the runs in a packed vector."""
        return packed.split([run.length for run in runs])


def _sum(sums: Tensor, ranks: Ranks) -> Tensor:
    """Sum in place over the ranks, via the device if the sums are in host memory."""
    return sums if ranks.world == 1 else sums.copy_(ranks.sum_(sums.to(ranks.device)))


def _runs(
    members: tuple[int, ...], names: Mapping[int, Sequence[str]], layouts: Sequence[Layout]
) -> Iterator[Run]:
    """The tensors held by the layouts, joined where they are adjacent in all groups."""
    columns = [list(_columns(layouts[group], theirs)) for group, theirs in names.items()]
    starts: list[int] = []
    length = 0
    for entries in sorted(zip(*columns, strict=True)):
        shapes = {shape for _, _, shape in entries}
        assert len(shapes) == 1, f"tensors of unlike shapes: {shapes}"
        if starts and [start for start, _, _ in entries] == [at + length for at in starts]:
            length += entries[0][1]
            continue
        if starts:
            yield Run(members, dict(zip(names, starts, strict=True)), length)
        starts, length = [start for start, _, _ in entries], entries[0][1]
    if starts:
        yield Run(members, dict(zip(names, starts, strict=True)), length)


def _columns(layout: Layout, names: Sequence[str]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Start, length with padding, and shape of the named tensors that the layout holds."""
    place = {entry.name: position for position, entry in enumerate(layout)}
    for name in names:
        if name in place:
            entry, stop = layout.entries[place[name]], layout.span(place[name] + 1)
            yield entry.offset, stop - entry.offset, entry.shape
