"""Slices: which elements of a wide model's row a narrower model's row covers, as small tables.

A narrower model ("level") owns a prefix of every dimension of every tensor. If a dimension consists
of groups (attention heads), it owns a prefix of every group. Dimensions that no level narrows are
folded into their neighbour, after which a tensor has at most three axes,

    target (A, B, C)  >=  source (a, b, c),     source[i, j, k] is target[i, j, k]

so one line of integers describes a tensor of a level, without index tensors. Consecutive tensors
that all levels hold in full are joined. `Members` are the clients of one merge.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels._blocks import Shape, block_of, check_names, fused, leading_run
from lightfed_kernels._rows import to_device
from lightfed_kernels.layout import Layout

# Elements of a tile, the piece of a tensor that one program owns.
TILE = 512

# Elements that must be adjacent and covered together to move 16 bytes at a time. float64 needs only
# 2, but shares the work list of float32.
VECTORS = {torch.float32: 4, torch.bfloat16: 8, torch.float64: 4}

# Most elements that a tile may span, including skipped columns: positions within a tile have 32
# bits.
_WIDE = 2**20


@dataclass(frozen=True, eq=False)
class Work:
    """Tiles of all tensors, those that many levels reach first.

    A tile is a line of (N, 4) int64: its tensor, its first row of A x B, its first column, and in
    one number log2 of its columns and, from bit 16 on, how many leading levels reach it.

    Attributes:
        flat: tiles whose elements move 16 bytes at a time, see SliceTable.tiles.
        flat_reached: how many of them the levels from one rank on can reach.
        rest, rest_reached: the other tiles.
    """

    flat: Tensor
    flat_reached: tuple[int, ...]
    rest: Tensor
    rest_reached: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SliceTable:
    """The parts of a target layout that several levels cover, as tables on a device.

    Attributes:
        target: the layout that is merged into and taken from.
        sources: the layouts of the levels, as given.
        ranks: position of every given level in the tables, where levels that cover more come first.
        num_labels: rows of the tensors whose rows are labels; 0 without such tensors.
        tensors: (T, 5) int64: offset, A, B, C, whether the rows A are labels.
        levels: (L, T, 4) int64: offset, a, b, c of the source; all 0 where it lacks the tensor.
        work: vector width -> the tiles.
        runs: levels, as given, that hold one leading run of the row in full, at the same place, and
            nothing else -> its length.
    """

    target: Layout
    sources: tuple[Layout, ...]
    ranks: tuple[int, ...]
    num_labels: int
    tensors: Tensor
    levels: Tensor
    work: Mapping[int, Work]
    runs: Mapping[int, int]

    @classmethod
    def build(
        cls,
        target: Layout,
        sources: Sequence[Layout],
        *,
        groups: Mapping[str, Shape] | None = None,
        label_rows: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> "SliceTable":
        """Relate layouts by the names of their tensors; a level may lack tensors.

        Args:
            target: the wide layout.
            sources: one layout a level, in any order.
            groups: name -> number of groups per dimension, if not all are 1: (8, 1) for the query
                weights of 8 heads, (1, 8) for the weights after them.
            label_rows: names of tensors whose first dimension is a label, which a client may hold
                or not.
            device: of the rows.

        Raises:
            ValueError: a source is not a slice of the target; names the tensor.
        """
        groups = groups or {}
        named = [{entry.name: entry for entry in source} for source in sources]
        check_names(target, named, label_rows)
        blocks = fused(
            [
                block_of(
                    entry,
                    [entries.get(entry.name) for entries in named],
                    groups.get(entry.name, (1,) * len(entry.shape)),
                    labelled=entry.name in label_rows,
                )
                for entry in target
                if any(entry.name in entries for entries in named)
            ]
        )
        covered = [sum(prod(x.sources[k][1:]) for x in blocks) for k in range(len(sources))]
        order = sorted(range(len(sources)), key=lambda k: -covered[k])
        lines = [(x.offset, *x.axes, int(x.labelled)) for x in blocks]
        tensors = np.array(lines, np.int64).reshape(-1, 5)
        levels = np.array([[x.sources[k] for x in blocks] for k in order], np.int64)
        device = torch.device(device)
        tiles, alignment = _tiles(tensors, levels)
        work = {
            vector: Work(
                *_by_reach(tiles[alignment % vector == 0], len(order), device),
                *_by_reach(tiles[alignment % vector > 0], len(order), device),
            )
            for vector in sorted(set(VECTORS.values()))
        }
        return cls(
            target=target,
            sources=tuple(sources),
            ranks=tuple(order.index(k) for k in range(len(sources))),
            num_labels=max((x.axes[0] for x in blocks if x.labelled), default=0),
            tensors=to_device(tensors, device),
            levels=to_device(levels.reshape(len(order), -1, 4), device),
            work=work,
            runs={k: size for k in range(len(order)) if (size := leading_run(blocks, k))},
        )

    @property
    def device(self) -> torch.device:
        return self.tensors.device

    def tiles(self, dtype: torch.dtype, rank: int) -> tuple[Tensor, Tensor]:
        """The tiles that levels from the one of this rank on can reach.

        Returns:
            (N, 4) those whose elements move 16 bytes at a time, and (M, 4) the rest.
        """
        work = self.work[VECTORS[dtype]]
        return work.flat[: work.flat_reached[rank]], work.rest[: work.rest_reached[rank]]


def _tiles(tensors: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, 4) tiles of all tensors, and (N,) how many of their elements, at most 8, move together.

    Of tensors with groups or labels, none do (1).
    """
    parts, alignments = [np.empty((0, 4), np.int64)], [np.empty(0, np.int64)]
    for t, (_, a, b, c, labelled) in enumerate(tensors.tolist()):
        if a * b * c == 0:
            continue
        kept = levels[:, t]
        columns = _columns(a * b, c)
        rows_columns = np.meshgrid(
            np.arange(0, a * b, TILE // columns), np.arange(0, c, columns), indexing="ij"
        )
        first_row, first_column = (first.ravel() for first in rows_columns)
        # (levels, tiles): whether a level has the tile's first row and column.
        has = (kept[:, 1:2] > first_row // b) & (kept[:, 3:4] > first_column)
        reach = (has * np.arange(1, len(kept) + 1)[:, None]).max(0, initial=0)
        packed = (columns.bit_length() - 1) | reach << 16
        parts.append(np.stack([np.full_like(first_row, t), first_row, first_column, packed], 1))
        together = 1 if b > 1 or labelled else int(np.gcd.reduce([8, c, columns, *kept[:, 3]]))
        alignments.append(np.full(len(first_row), together))
    return np.concatenate(parts), np.concatenate(alignments)


def _by_reach(
    tiles: np.ndarray, levels: int, device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """Tiles that many levels reach first; and how many the levels from each one on reach."""
    reach = tiles[:, 3] >> 16
    ordered = tiles[np.argsort(-reach, kind="stable")][: int((reach > 0).sum())]
    return to_device(ordered, device), tuple(int((reach > k).sum()) for k in range(levels))


def _columns(rows: int, columns: int) -> int:
    """The power of two that leaves the fewest lanes of (rows, columns) idle; the widest of them."""
    if columns >= _WIDE or rows == 1:
        return TILE

    def lanes(width: int) -> int:
        return -(-rows // (TILE // width)) * -(-columns // width)

    return min((TILE >> shift for shift in range(TILE.bit_length())), key=lanes)


@dataclass(frozen=True, eq=False)
class Members:
    """All clients of a merge on all processes, and those whose rows are local.

    The tables list the local clients by level, wide levels first, and within a level as given. A
    client of weight 0 is not in them: a NaN times 0 is a NaN.

    Attributes:
        table: what the levels cover.
        clients: number of all clients.
        sizes: row length of every local client, in the order given.
        order: local client of every line of the tables.
        first: (L + 1,) int32: where the local clients of every level begin.
        weights: (lines,) float64.
        totals: (L,) float64: the weights of all clients of a level.
        label_words: (lines, ceil(labels / 32)) int32: bit k of a client: it holds label k.
        label_totals: (L, labels) float64: the weights of all clients of a level with a label.
        widest: the first rank (of SliceTable) among all clients, and among the local ones.
    """

    table: SliceTable
    clients: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    first: Tensor
    weights: Tensor
    totals: Tensor
    label_words: Tensor
    label_totals: Tensor
    widest: tuple[int, int]

    @classmethod
    def build(
        cls,
        table: SliceTable,
        levels: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        labels: Sequence[Sequence[int] | None] | None = None,
        local: Sequence[int] | None = None,
    ) -> "Members":
        """Define the clients of a merge; everything is checked here, on the host.

        Args:
            table: of the levels.
            levels: position of every client's level in the table's `sources`.
            weights: a_k >= 0; 1 for all by default. Rows of weight 0 are not read.
            labels: the labels that each client holds; None (for one client or all) means every
                label.
            local: positions of the clients whose rows are local; all by default.

        Raises:
            ValueError: names the client.
        """
        count = len(levels)
        if count == 0:
            raise ValueError("levels: no client takes part in the merge")
        a = _checked_weights(weights, count)
        ranks = np.array([table.ranks[level] for level in checked_levels(levels, table)])
        held = _held(labels, table, count)
        given = _checked_local(local, count)
        taking_part = [i for i, k in enumerate(given) if a[k] > 0]
        order = sorted(taking_part, key=lambda i: ranks[given[i]])  # stable
        mine = [given[i] for i in order]
        n_levels = len(table.ranks)
        first = np.searchsorted(ranks[mine], np.arange(n_levels + 1)).astype(np.int32)
        totals = np.bincount(ranks, weights=a, minlength=n_levels)
        label_totals = np.zeros((n_levels, table.num_labels))
        np.add.at(label_totals, ranks, a[:, None] * held)
        device = table.device
        return cls(
            table=table,
            clients=count,
            sizes=tuple(table.sources[levels[k]].size for k in given),
            order=tuple(order),
            first=to_device(first, device),
            weights=to_device(a[mine], device),
            totals=to_device(totals, device),
            label_words=to_device(_packed(held[mine]), device),
            label_totals=to_device(label_totals, device),
            widest=(int(ranks.min()), int(ranks[mine].min(initial=n_levels - 1))),
        )


def _checked_weights(weights: Sequence[float] | None, count: int) -> np.ndarray:
    if weights is None:
        return np.ones(count)
    if len(weights) != count:
        raise ValueError(f"weights: {len(weights)} for {count} clients")
    for client, weight in enumerate(weights):
        if not (isfinite(weight) and weight >= 0):
            raise ValueError(f"weights: {weight} of client {client}; weights are finite and >= 0")
    return np.asarray(weights, np.float64)


def checked_levels(levels: Sequence[int], table: SliceTable) -> Sequence[int]:
    """Levels of clients that the table has.

    Raises:
        ValueError: names the client.
    """
    for client, level in enumerate(levels):
        if not 0 <= level < len(table.ranks):
            raise ValueError(
                f"levels: {level} of client {client}; the table has 0 .. {len(table.ranks) - 1}"
            )
    return levels


def _checked_local(local: Sequence[int] | None, count: int) -> list[int]:
    if local is None:
        return list(range(count))
    if len(set(local)) != len(local) or any(not 0 <= k < count for k in local):
        raise ValueError(f"local: {list(local)}; distinct positions in 0 .. {count - 1} are needed")
    return list(local)


def _held(
    labels: Sequence[Sequence[int] | None] | None, table: SliceTable, count: int
) -> np.ndarray:
    """(clients, labels) bool."""
    held = np.ones((count, table.num_labels), bool)
    if labels is None or table.num_labels == 0:
        return held
    if len(labels) != count:
        raise ValueError(f"labels: {len(labels)} for {count} clients")
    for client, own in enumerate(labels):
        if own is None:
            continue
        index = np.asarray(own, np.int64)
        if index.size and (index.min() < 0 or index.max() >= table.num_labels):
            raise ValueError(
                f"labels: client {client} holds labels {index.min()} .. {index.max()}; "
                f"there are 0 .. {table.num_labels - 1}"
            )
        held[client] = False
        held[client, index] = True
    return held


def _packed(held: np.ndarray) -> np.ndarray:
    """(clients, labels) bool -> (clients, ceil(labels / 32)) int32, bit i of word w: 32 w + i."""
    wide = -(-held.shape[1] // 32) * 32
    padded = np.zeros((held.shape[0], wide), bool)
    padded[:, : held.shape[1]] = held
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32)
