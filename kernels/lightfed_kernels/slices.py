"""Slices: which elements of a wide model's row a narrower model's row covers, as small tables.

A narrower model ("level") owns a prefix of every dimension of every tensor. If a dimension consists
of groups (attention heads), it owns a prefix of every group. Dimensions that no level narrows are
folded into their neighbour, after which a tensor has at most three axes,

    target (A, B, C)  >=  source (a, b, c),     source[i, j, k] is target[i, j, k]

so one line of integers describes a tensor of a level, without index tensors. Consecutive tensors
that all levels hold in full are joined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels._rows import to_device
from lightfed_kernels.layout import Entry, Layout, padded

# Elements of a tile, the piece of a tensor that one program owns.
TILE = 512

# Elements that must be adjacent and covered together to move 16 bytes at a time. float64 needs only
# 2, but shares the work list of float32.
VECTORS = {torch.float32: 4, torch.bfloat16: 8, torch.float64: 4}

# Most elements that a tile may span, including skipped columns: positions within a tile have 32
# bits.
_WIDE = 2**20

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Block:
    """One tensor (or several in one): its axes in the target, and in every level (0: absent)."""

    offset: int
    axes: tuple[int, int, int]
    sources: tuple[tuple[int, int, int, int], ...]  # (offset, a, b, c) of every level
    labelled: bool

    @property
    def full(self) -> bool:
        """Every level that has the tensor has all of it."""
        return not self.labelled and all(s[1] == 0 or s[1:] == self.axes for s in self.sources)

    @property
    def end(self) -> int:
        """Where the next tensor starts."""
        return padded(self.offset + prod(self.axes))


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
        _check_names(target, named, label_rows)
        blocks = _fuse(
            [
                _block(
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
            runs={k: size for k in range(len(order)) if (size := _run(blocks, k))},
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


def _check_names(
    target: Layout, named: Sequence[Mapping[str, Entry]], label_rows: Sequence[str]
) -> None:
    names = {entry.name for entry in target}
    for name in label_rows:
        if name not in names:
            raise ValueError(f"label_rows: the target has no tensor {name!r}")
    for level, entries in enumerate(named):
        if not names & set(entries):
            raise ValueError(f"sources[{level}]: no tensor has a name of the target's")


def _block(
    entry: Entry, sources: Sequence[Entry | None], groups: Shape, *, labelled: bool
) -> _Block:
    """One tensor of the target against every level."""
    wide = _split(entry, groups)
    # (dimensions, 1 + levels): the target's size, then every level's; an absent level as if whole.
    sizes = np.array([wide, *(wide for _ in sources)], np.int64).reshape(len(sources) + 1, -1).T
    for level, source in enumerate(sources):
        if source is not None:
            same = len(source.shape) == len(entry.shape)
            narrow = _split(source, groups) if same else []
            if not same or any(n > w for n, w in zip(narrow, wide, strict=True)):
                raise ValueError(
                    f"{entry.name} is {list(source.shape)}, which is no slice of "
                    f"{list(entry.shape)}"
                )
            sizes[:, level + 1] = narrow
    axes = _fold(entry, sizes, labelled=labelled)
    lines = [
        (0, 0, 0, 0) if source is None or not axes[:, k].all() else (source.offset, *axes[:, k])
        for k, source in enumerate(sources, 1)
    ]
    return _Block(
        entry.offset,
        _triple(axes[:, 0]),
        tuple(tuple(int(x) for x in line) for line in lines),  # type: ignore[misc]
        labelled,
    )


def _split(entry: Entry, groups: Shape) -> list[int]:
    """A shape with every grouped dimension as two: groups, and size of a group."""
    if len(groups) != len(entry.shape):
        raise ValueError(
            f"groups: {entry.name} has {len(entry.shape)} dimensions, not {len(groups)}"
        )
    sizes: list[int] = []
    for size, count in zip(entry.shape, groups, strict=True):
        if size % count:
            raise ValueError(f"groups: {entry.name} has {size} elements in {count} equal groups")
        sizes.extend((size,) if count == 1 else (count, size // count))
    return sizes


def _fold(entry: Entry, sizes: np.ndarray, *, labelled: bool) -> np.ndarray:
    """(3, 1 + levels): dimensions that all levels keep whole, folded into the one before."""
    axes: list[np.ndarray] = []
    for position in reversed(range(len(sizes))):
        first_of_labels = labelled and position == 0
        if axes and (axes[0] == axes[0][0]).all() and not first_of_labels:
            axes[0] = axes[0] * sizes[position]
        else:
            axes.insert(0, sizes[position])
    if len(axes) > 3:
        raise ValueError(
            f"{entry.name}: narrowed in {len(axes)} separate dimensions; 3 are possible"
        )
    if labelled and not axes:
        raise ValueError(f"label_rows: {entry.name} is a scalar")
    one = np.ones(sizes.shape[1], np.int64)
    # Rows are the first axis and columns the last; labels are rows even where they are all.
    if len(axes) == 1 and labelled:
        axes.append(one)
    while len(axes) < 3:
        axes.insert(0 if len(axes) < 2 else 1, one)
    return np.stack(axes)


def _fuse(blocks: Sequence[_Block]) -> list[_Block]:
    """Join consecutive tensors, with their padding, that all their levels hold in full."""
    fused: list[_Block] = []
    for block in blocks:
        last = fused[-1] if fused else None
        if not block.full:
            fused.append(block)
        elif last is None or not _adjacent(last, block):
            fused.append(_flat(block, block.end - block.offset))
        else:
            fused[-1] = _flat(last, block.end - last.offset)
    return fused


def _flat(block: _Block, size: int) -> _Block:
    sources = tuple(
        (offset, 1, 1, size) if a else (0, 0, 0, 0) for offset, a, _, _ in block.sources
    )
    return _Block(block.offset, (1, 1, size), sources, labelled=False)


def _adjacent(one: _Block, other: _Block) -> bool:
    """Whether both are whole in the same levels, at the same distance as in the target."""
    return (
        one.full
        and one.end == other.offset
        and all(
            (s[1] == 0 and o[1] == 0)
            or (s[1] > 0 and o[1] > 0 and o[0] - s[0] == other.offset - one.offset)
            for s, o in zip(one.sources, other.sources, strict=True)
        )
    )


def _run(blocks: Sequence[_Block], level: int) -> int:
    """Length of the one leading run that a level holds; 0 if it holds anything else."""
    end = 0
    for block in blocks:
        offset, *sizes = block.sources[level]
        if not any(sizes):
            continue
        if block.labelled or tuple(sizes) != block.axes or not offset == block.offset == end:
            return 0
        end = block.end
    return end


def _triple(axis: np.ndarray) -> tuple[int, int, int]:
    a, b, c = (int(size) for size in axis)
    return a, b, c


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
