"""One tensor of a wide model against every narrower model: at most three axes, see `slices`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from lightfed_kernels.layout import Entry, Layout, padded

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """One tensor (or several in one): its axes in the target, and in every level (0: absent)."""

    offset: int
    axes: Shape
    sources: tuple[Shape, ...]  # (offset, a, b, c) of every level
    labelled: bool

    @property
    def full(self) -> bool:
        """Every level that has the tensor has all of it."""
        return not self.labelled and all(s[1] == 0 or s[1:] == self.axes for s in self.sources)

    @property
    def end(self) -> int:
        """Where the next tensor starts."""
        return padded(self.offset + prod(self.axes))


def check_names(
    target: Layout, named: Sequence[Mapping[str, Entry]], label_rows: Sequence[str]
) -> None:
    names = {entry.name for entry in target}
    for name in label_rows:
        if name not in names:
            raise ValueError(f"label_rows: the target has no tensor {name!r}")
    for level, entries in enumerate(named):
        if not names & set(entries):
            raise ValueError(f"sources[{level}]: no tensor has a name of the target's")


def block_of(
    entry: Entry, sources: Sequence[Entry | None], groups: Shape, *, labelled: bool
) -> Block:
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
    whole, *kept = map(tuple, axes.T.tolist())
    lines = [
        (0, 0, 0, 0) if source is None or not all(sizes) else (source.offset, *sizes)
        for source, sizes in zip(sources, kept, strict=True)
    ]
    return Block(entry.offset, whole, tuple(lines), labelled)


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


def fused(blocks: Sequence[Block]) -> list[Block]:
    """Join consecutive tensors, with their padding, that all their levels hold in full."""
    done: list[Block] = []
    for block in blocks:
        last = done[-1] if done else None
        if not block.full:
            done.append(block)
        elif last is None or not _adjacent(last, block):
            done.append(_flat(block, block.end - block.offset))
        else:
            done[-1] = _flat(last, block.end - last.offset)
    return done


def _flat(block: Block, size: int) -> Block:
    sources = tuple(
        (offset, 1, 1, size) if a else (0, 0, 0, 0) for offset, a, _, _ in block.sources
    )
    return Block(block.offset, (1, 1, size), sources, labelled=False)


def _adjacent(one: Block, other: Block) -> bool:
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


def leading_run(blocks: Sequence[Block], level: int) -> int:
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
