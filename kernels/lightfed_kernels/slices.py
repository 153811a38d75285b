"""Slices: which elements of a wide model's row a narrower model's row covers, as small tables.

A narrower model (a "level") owns a prefix of every dimension of every tensor. If a dimension
consists of groups, such as attention heads, it owns a prefix of every group. Dimensions that no
level narrows are folded into their neighbor. After that a tensor has at most three axes,

    target (A, B, C)  >=  source (a, b, c),     source[i, j, k] is target[i, j, k]

so that one line of integers describes a tensor of a level, without index tensors. Consecutive
tensors that all levels hold in full are joined. `Members` are the clients of one merge.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite, prod

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels._blocks import Block, Shape, block_of, check_names, fused, leading_run
from lightfed_kernels._rows import to_device, to_device_together
from lightfed_kernels.layout import Layout

# Elements of a tile, the piece of a tensor that one program owns.
TILE = 512

# Elements that must be adjacent and covered together, so that a kernel moves 16 bytes at a time.
# float64 needs only 2, but shares the work list of float32.
VECTORS = {torch.float32: 4, torch.bfloat16: 8, torch.float64: 4}

# From so many columns on, a tile is a part of a single row. Positions within a tile have 32 bits,
# and a tile of several rows spans the columns between its own as well.
_WIDE = 2**20


@dataclass(frozen=True, eq=False)
class Work:
    """The tiles of all tensors, those that many levels reach first.

    A tile is a line of (N, 4) int64: its tensor, its first row of A x B, its first column, and in
    one number log2 of its columns and, from bit 16 on, how many leading levels reach it.

    Attributes:
        flat: (N, 4) the tiles whose elements move 16 bytes at a time; see SliceTable.tiles.
        flat_reached: How many of them the levels from one rank on can reach, by that rank.
        rest: (M, 4) the other tiles.
        rest_reached: The same for these.
    """

    flat: Tensor
    flat_reached: tuple[int, ...]
    rest: Tensor
    rest_reached: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SliceTable:
    """The parts of a target layout that several levels cover, as tables on a device.

    Attributes:
        target: The layout that is merged into and taken from.
        sources: The layouts of the levels, as given.
        ranks: The position of every given level in the tables, where levels that cover more come
            first.
        num_labels: The number of rows of the tensors whose rows are labels; 0 without any.
        tensors: (T, 5) int64: offset, A, B, C, and whether the rows A are labels.
        levels: (L, T, 4) int64: offset, a, b, c of the source; all 0 where it lacks the tensor.
        work: The tiles, by the number of elements that move together.
        runs: Of those levels, as given, that hold one leading run of the row in full, at the same
            place, and nothing else: the length of the run.
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
            target: The wide layout.
            sources: One layout for each level, in any order.
            groups: The numbers of groups per dimension, by the name of a tensor, if not all are 1:
                (8, 1) for the query weights of 8 heads, (1, 8) for the weights after them.
            label_rows: The names of tensors whose first dimension is a label, which a client may
                hold or not.
            device: The device of the rows.

        Raises:
            ValueError: A source is not a slice of the target; names the tensor.
        """
        device = torch.device(device)
        groups = groups or {}
        entries_of_levels = [{entry.name: entry for entry in source} for source in sources]
        check_names(target, entries_of_levels, label_rows)

        blocks: list[Block] = []
        for entry in target:
            entry_of_levels = [entries.get(entry.name) for entries in entries_of_levels]
            if any(source is not None for source in entry_of_levels):
                ungrouped = (1,) * len(entry.shape)
                block = block_of(
                    entry,
                    entry_of_levels,
                    groups.get(entry.name, ungrouped),
                    labelled=entry.name in label_rows,
                )
                blocks.append(block)
        blocks = fused(blocks)

        # Levels that cover more come first, so that a tile is reached by the first so many levels.
        covered = []
        for level in range(len(sources)):
            covered.append(sum(prod(block.sources[level][1:]) for block in blocks))
        order = sorted(range(len(sources)), key=lambda level: -covered[level])

        lines = [(block.offset, *block.axes, int(block.labelled)) for block in blocks]
        tensors = np.array(lines, np.int64).reshape(-1, 5)
        levels = np.array([[block.sources[level] for block in blocks] for level in order], np.int64)
        runs = {}
        for level in range(len(sources)):
            length = leading_run(blocks, level)
            if length:
                runs[level] = length
        return cls(
            target=target,
            sources=tuple(sources),
            ranks=tuple(order.index(level) for level in range(len(sources))),
            num_labels=max((block.axes[0] for block in blocks if block.labelled), default=0),
            tensors=to_device(tensors, device),
            levels=to_device(levels.reshape(len(order), -1, 4), device),
            work=_work(tensors, levels, device),
            runs=runs,
        )

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return self.tensors.device

    def tiles(self, dtype: torch.dtype, rank: int) -> tuple[Tensor, Tensor]:
        """Return the tiles that the levels from one rank on can reach.

        Args:
            dtype: The dtype of the rows.
            rank: The rank.

        Returns:
            (N, 4) those whose elements move 16 bytes at a time, and (M, 4) the rest.
        """
        work = self.work[VECTORS[dtype]]
        return work.flat[: work.flat_reached[rank]], work.rest[: work.rest_reached[rank]]


def _work(tensors: np.ndarray, levels: np.ndarray, device: torch.device) -> dict[int, Work]:
    """Return the tiles of all tensors, by the number of elements that move together."""
    num_levels = len(levels)
    tiles, together = _tiles(tensors, levels)
    work = {}
    for vector in sorted(set(VECTORS.values())):
        is_flat = together % vector == 0
        flat, flat_reached = _by_reach(tiles[is_flat], num_levels, device)
        rest, rest_reached = _by_reach(tiles[~is_flat], num_levels, device)
        work[vector] = Work(flat, flat_reached, rest, rest_reached)
    return work


def _tiles(tensors: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut all tensors into tiles.

    Args:
        tensors: (T, 5), as of SliceTable.
        levels: (L, T, 4), as of SliceTable.

    Returns:
        (N, 4) the tiles, as of Work, and (N,) how many of their elements, at most 8, move together.
        Of tensors with groups or labels, none do: 1.
    """
    tiles = [np.empty((0, 4), np.int64)]
    together = [np.empty(0, np.int64)]
    for tensor, (_, a, b, c, labelled) in enumerate(tensors.tolist()):
        if a * b * c == 0:
            continue
        sources = levels[:, tensor]
        columns = _columns(a * b, c)
        rows, firsts = np.meshgrid(
            np.arange(0, a * b, TILE // columns), np.arange(0, c, columns), indexing="ij"
        )
        first_row = rows.ravel()
        first_column = firsts.ravel()

        # (L, tiles): whether a level has the first row and the first column of a tile. If it lacks
        # these, it has nothing of the tile.
        has = (sources[:, 1:2] > first_row // b) & (sources[:, 3:4] > first_column)
        reach = (has * np.arange(1, len(sources) + 1)[:, None]).max(0, initial=0)

        log2_columns = columns.bit_length() - 1
        packed = log2_columns | reach << 16
        of_tensor = np.full_like(first_row, tensor)
        tiles.append(np.stack([of_tensor, first_row, first_column, packed], 1))

        number = 1
        if b == 1 and not labelled:
            number = int(np.gcd.reduce([8, c, columns, *sources[:, 3]]))
        together.append(np.full(len(first_row), number))
    return np.concatenate(tiles), np.concatenate(together)


def _by_reach(
    tiles: np.ndarray, levels: int, device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """Sort tiles by the number of levels that reach them, most first.

    Returns:
        (N, 4) the tiles that any level reaches, and by rank, how many of them the levels from that
        rank on reach.
    """
    reach = tiles[:, 3] >> 16
    num_reached = int((reach > 0).sum())
    most_first = tiles[np.argsort(-reach, kind="stable")][:num_reached]
    reached_by_rank = tuple(int((reach > rank).sum()) for rank in range(levels))
    return to_device(most_first, device), reached_by_rank


def _columns(rows: int, columns: int) -> int:
    """Choose the columns of a tile for a tensor of (rows, columns).

    They are the power of two with which the tiles have the fewest lanes without an element, and
    the widest of several such.
    """
    if columns >= _WIDE or rows == 1:
        return TILE

    def num_tiles(width: int) -> int:
        """Return the number of tiles with so many columns; all tiles have as many lanes."""
        return -(-rows // (TILE // width)) * -(-columns // width)

    widths = [TILE >> shift for shift in range(TILE.bit_length())]  # the widest first
    return min(widths, key=num_tiles)


@dataclass(frozen=True, eq=False)
class Members:
    """All clients of a merge on all processes, and those whose rows are local.

    The tables list the local clients by level, wide levels first, and within a level as given. A
    client of weight 0 is not in them, because a NaN times 0 is a NaN.

    Attributes:
        table: What the levels cover.
        clients: The number of all clients.
        sizes: The row length of every local client, in the order given.
        order: The local client of every line of the tables.
        first: (L + 1,) int32: where the local clients of every level begin.
        weights: (lines,) float64.
        totals: (L,) float64: the weights of all clients of a level.
        label_words: (lines, ceil(labels / 32)) int32: bit k is 1 if the client holds label k.
        label_totals: (L, labels) float64: the weights of all clients of a level with a label.
        widest: The first rank (of SliceTable) among all clients, and among the local ones.
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
            table: The table of the levels.
            levels: The position of every client's level in the table's `sources`.
            weights: a_k >= 0; 1 for all by default. Rows of weight 0 are not read.
            labels: The labels that each client holds; None, for one client or for all, means every
                label.
            local: The positions of the clients whose rows are local; all by default.

        Raises:
            ValueError: A client does not fit; names the client.
        """
        count = len(levels)
        if count == 0:
            raise ValueError("levels: no client takes part in the merge")
        weight_of = _checked_weights(weights, count)
        rank_of = np.array([table.ranks[level] for level in checked_levels(levels, table)])
        holds = _held_labels(labels, table, count)
        local_clients = _checked_local(local, count)

        # Positions among the local clients, sorted by level; within a level they stay as given.
        positions = [i for i, k in enumerate(local_clients) if weight_of[k] > 0]
        order = sorted(positions, key=lambda i: rank_of[local_clients[i]])
        clients_in_tables = [local_clients[i] for i in order]
        ranks_in_tables = rank_of[clients_in_tables]

        num_levels = len(table.ranks)
        first = np.searchsorted(ranks_in_tables, np.arange(num_levels + 1)).astype(np.int32)
        totals = np.bincount(rank_of, weights=weight_of, minlength=num_levels)
        label_totals = np.zeros((num_levels, table.num_labels))
        np.add.at(label_totals, rank_of, weight_of[:, None] * holds)

        on_device = to_device_together(
            [
                first,
                weight_of[clients_in_tables],
                totals,
                _packed(holds[clients_in_tables]),
                label_totals,
            ],
            table.device,
        )
        return cls(
            table=table,
            clients=count,
            sizes=tuple(table.sources[levels[k]].size for k in local_clients),
            order=tuple(order),
            first=on_device[0],
            weights=on_device[1],
            totals=on_device[2],
            label_words=on_device[3],
            label_totals=on_device[4],
            widest=(
                int(rank_of.min()),
                int(ranks_in_tables.min(initial=num_levels - 1)),
            ),
        )


def _checked_weights(weights: Sequence[float] | None, count: int) -> np.ndarray:
    """Return the weights of `count` clients as (count,) of float64."""
    if weights is None:
        return np.ones(count)
    if len(weights) != count:
        raise ValueError(f"weights: {len(weights)} for {count} clients")
    for client, weight in enumerate(weights):
        if not (isfinite(weight) and weight >= 0):
            raise ValueError(f"weights: {weight} of client {client}; weights are finite and >= 0")
    return np.asarray(weights, np.float64)


def checked_levels(levels: Sequence[int], table: SliceTable) -> Sequence[int]:
    """Return the clients' levels, after checking that the table has them.

    Raises:
        ValueError: It lacks one of them; names the client.
    """
    for client, level in enumerate(levels):
        if not 0 <= level < len(table.ranks):
            raise ValueError(
                f"levels: {level} of client {client}; the table has 0 .. {len(table.ranks) - 1}"
            )
    return levels


def _checked_local(local: Sequence[int] | None, count: int) -> list[int]:
    """Return the positions of the local clients among `count` clients."""
    if local is None:
        return list(range(count))
    if len(set(local)) != len(local) or any(not 0 <= k < count for k in local):
        raise ValueError(f"local: {list(local)}; distinct positions in 0 .. {count - 1} are needed")
    return list(local)


def _held_labels(
    labels: Sequence[Sequence[int] | None] | None, table: SliceTable, count: int
) -> np.ndarray:
    """Return which labels each client holds, as (clients, labels) of bool."""
    holds = np.ones((count, table.num_labels), bool)
    if labels is None or table.num_labels == 0:
        return holds
    if len(labels) != count:
        raise ValueError(f"labels: {len(labels)} for {count} clients")

    # All clients at once: this is done for every merge, and takes longer than its launch.
    given = {client: some for client, some in enumerate(labels) if some is not None}
    label = np.fromiter(chain.from_iterable(given.values()), np.int64)
    holder = np.repeat(
        np.fromiter(given, np.int64), np.fromiter(map(len, given.values()), np.int64)
    )
    wrong = (label < 0) | (label >= table.num_labels)
    if wrong.any():
        client = int(holder[wrong.argmax()])
        labels_of_client = label[holder == client]
        raise ValueError(
            f"labels: client {client} holds labels {labels_of_client.min()} .. "
            f"{labels_of_client.max()}; there are 0 .. {table.num_labels - 1}"
        )
    holds[list(given)] = False
    holds[holder, label] = True
    return holds


def _packed(holds: np.ndarray) -> np.ndarray:
    """Pack (clients, labels) of bool into (clients, words) of int32.

    Bit i of word w is label 32 w + i.
    """
    clients, labels = holds.shape
    padded = np.zeros((clients, -(-labels // 32) * 32), bool)
    padded[:, :labels] = holds
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32)
