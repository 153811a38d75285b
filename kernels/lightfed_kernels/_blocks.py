"""One tensor of a wide model against every narrower model: at most three axes, see `slices`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from lightfed_kernels.layout import Entry, Layout, padded

Shape = tuple[int, ...]

# In place of the source of a level that lacks the tensor.
_ABSENT = (0, 0, 0, 0)


@dataclass(frozen=True)
class Block:
    """One tensor of the target, or several in one, and its counterpart in every level.

    Attributes:
        offset: Where it begins in a row of the target.
        axes: A, B and C.
        sources: Of every level offset, a, b and c; all 0 where the level lacks the tensor.
        labelled: Whether the rows A are labels.
    """

    offset: int
    axes: Shape
    sources: tuple[Shape, ...]
    labelled: bool

    @property
    def full(self) -> bool:
        """Whether every level that has the tensor has all of it."""
        if self.labelled:
            return False  # a client may lack labels
        return all(_is_absent(source) or source[1:] == self.axes for source in self.sources)

    @property
    def end(self) -> int:
        """Where the next tensor begins in a row of the target."""
        return padded(self.offset + prod(self.axes))


def _is_absent(source: Shape) -> bool:
    """Whether a level lacks the tensor."""
    return source[1] == 0


def check_names(
    target: Layout, named: Sequence[Mapping[str, Entry]], label_rows: Sequence[str]
) -> None:
    """Refuse names of labelled tensors that the target lacks, and levels that share no name.

    Args:
        target: The layout of the target.
        named: Of every level, its tensors by name.
        label_rows: The names of the tensors whose rows are labels.
    """
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
    """Relate one tensor of the target to every level.

    Args:
        entry: The tensor.
        sources: The tensor of the same name in every level; None where the level lacks it.
        groups: The number of groups in each of its dimensions.
        labelled: Whether its rows are labels.

    Raises:
        ValueError: A level has no slice of the tensor, or too many of its dimensions are narrowed.
    """
    sizes_of_target = _split(entry, groups)

    # (dimensions, 1 + levels): the size in the target, then in every level. A level that lacks the
    # tensor counts as if it had all of it, so that it does not keep dimensions apart.
    columns = [sizes_of_target]
    for source in sources:
        if source is None:
            columns.append(sizes_of_target)
        else:
            columns.append(_sizes_of_slice(entry, source, groups))
    sizes = np.array(columns, np.int64).reshape(len(columns), -1).T

    axes = _fold(entry, sizes, labelled=labelled)
    axes_of_target, *axes_of_levels = [tuple(column) for column in axes.T.tolist()]
    lines: list[Shape] = []
    for source, axes_of_level in zip(sources, axes_of_levels, strict=True):
        if source is None or 0 in axes_of_level:
            lines.append(_ABSENT)
        else:
            lines.append((source.offset, *axes_of_level))
    return Block(entry.offset, axes_of_target, tuple(lines), labelled)


def _sizes_of_slice(entry: Entry, source: Entry, groups: Shape) -> list[int]:
    """Return the sizes of a level's tensor, after checking that it is a slice of the target's."""
    no_slice = ValueError(
        f"{entry.name} is {list(source.shape)}, which is no slice of {list(entry.shape)}"
    )
    if len(source.shape) != len(entry.shape):
        raise no_slice
    sizes = _split(source, groups)
    if any(size > most for size, most in zip(sizes, _split(entry, groups), strict=True)):
        raise no_slice
    return sizes


def _split(entry: Entry, groups: Shape) -> list[int]:
    """Return a shape with two sizes for every grouped dimension: groups, and size of a group."""
    if len(groups) != len(entry.shape):
        raise ValueError(
            f"groups: {entry.name} has {len(entry.shape)} dimensions, not {len(groups)}"
        )
    sizes: list[int] = []
    for size, count in zip(entry.shape, groups, strict=True):
        if size % count:
            raise ValueError(f"groups: {entry.name} has {size} elements in {count} equal groups")
        if count == 1:
            sizes.append(size)
        else:
            sizes += [count, size // count]
    return sizes


def _fold(entry: Entry, sizes: np.ndarray, *, labelled: bool) -> np.ndarray:
    """Fold dimensions that all levels keep whole into the dimension before them.

    Args:
        entry: The tensor.
        sizes: (dimensions, 1 + levels), see `block_of`.
        labelled: Whether its rows are labels, which must stay an axis of their own.

    Returns:
        (3, 1 + levels): the axes A, B and C.

    Raises:
        ValueError: More than three axes are left.
    """
    axes: list[np.ndarray] = []
    for position in reversed(range(len(sizes))):
        is_label_axis = labelled and position == 0
        following_is_whole = bool(axes) and bool((axes[0] == axes[0][0]).all())
        if following_is_whole and not is_label_axis:
            axes[0] = axes[0] * sizes[position]
        else:
            axes.insert(0, sizes[position])

    if len(axes) > 3:
        raise ValueError(
            f"{entry.name}: narrowed in {len(axes)} separate dimensions; 3 are possible"
        )
    if labelled and not axes:
        raise ValueError(f"label_rows: {entry.name} is a scalar")

    # A is the rows and C the columns; labels are rows even if they are the only axis.
    one = np.ones(sizes.shape[1], np.int64)
    if len(axes) == 0:
        axes = [one, one, one]
    elif len(axes) == 1 and labelled:
        axes = [axes[0], one, one]
    elif len(axes) == 1:
        axes = [one, one, axes[0]]
    elif len(axes) == 2:
        axes = [axes[0], one, axes[1]]
    return np.stack(axes)


def fused(blocks: Sequence[Block]) -> list[Block]:
    """Join consecutive tensors, with their padding, that all their levels hold in full."""
    joined: list[Block] = []
    for block in blocks:
        if not block.full:
            joined.append(block)
        elif joined and _continues(joined[-1], block):
            last = joined.pop()
            joined.append(_as_one_row(last, block.end - last.offset))
        else:
            joined.append(_as_one_row(block, block.end - block.offset))
    return joined


def _as_one_row(block: Block, size: int) -> Block:
    """Return a block of `size` columns in a single row, which all its levels hold in full."""
    sources: list[Shape] = []
    for source in block.sources:
        sources.append(_ABSENT if _is_absent(source) else (source[0], 1, 1, size))
    return Block(block.offset, (1, 1, size), tuple(sources), labelled=False)


def _continues(last: Block, block: Block) -> bool:
    """Whether a full block lies directly behind another one, in the target and in every level."""
    if not last.full or last.end != block.offset:
        return False
    for source_of_last, source in zip(last.sources, block.sources, strict=True):
        if _is_absent(source_of_last) and _is_absent(source):
            continue
        if _is_absent(source_of_last) or _is_absent(source):
            return False
        if source[0] - source_of_last[0] != block.offset - last.offset:
            return False
    return True


def leading_run(blocks: Sequence[Block], level: int) -> int:
    """Return the length of the single leading run that a level holds; 0 if it holds another part.

    Such a level has the first so many elements of the target's row, at the same place.
    """
    end = 0
    for block in blocks:
        offset, *axes = block.sources[level]
        if not any(axes):
            continue
        is_whole = tuple(axes) == block.axes and not block.labelled
        if not is_whole or offset != block.offset or block.offset != end:
            return 0
        end = block.end
    return end
