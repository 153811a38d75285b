"""What covers what: `take` a client's part of a layout, `merge` many parts back into it.

    out[e] = sum_k a_k c_k[e] w_k[e] / sum_k a_k c_k[e];   elements nobody covers keep their old
    value

Widths, depths and label rows are all coverages. The sums are order-free: float64 over integer
weights is exact unless the addends of one element span more than about 2^18 in magnitude, and
`fixed` sums 64-bit integers, which is exact always; so the result does not depend on how clients
lie on ranks. Counts follow from metadata and are never communicated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from lightfed_kernels import Layout
from torch import Tensor

Accumulate = Literal["float64", "fixed"]

# Fixed point: a weighted mean in units of 2^-40, that is |values| below 2^22 with a resolution of
# 9e-13.
FIXED_SCALE = 2.0**40
FIXED_LIMIT = 2.0**22


@dataclass(frozen=True)
class Block:
    """One tensor that is covered by its leading slice.

    `target[:s0, :s1, ...]` is the source tensor.

    Attributes:
        target, source: (offset, shape) of the tensor in either layout.
    """

    target: tuple[int, tuple[int, ...]]
    source: tuple[int, tuple[int, ...]]
    name: str

    def target_view(self, row: Tensor) -> Tensor:
        """The covered part of the target tensor, shaped like the source tensor."""
        offset, shape = self.target
        view = row[offset : offset + _numel(shape)].view(shape)
        for dim, size in enumerate(self.source[1]):
            if size != shape[dim]:
                view = view.narrow(dim, 0, size)
        return view

    def source_view(self, row: Tensor) -> Tensor:
        offset, shape = self.source
        return row[offset : offset + _numel(shape)].view(shape)


@dataclass(frozen=True, eq=False)
class Coverage:
    """Which elements of a target layout a source row covers.

    Attributes:
        identity: both layouts are equal: one vector operation over the leading `span` elements.
        blocks: otherwise, one per tensor.
        label_blocks: the tensors whose rows are class labels; a source may be restricted to some of
            them.
    """

    span: int
    identity: bool
    blocks: tuple[Block, ...] = ()
    label_blocks: tuple[Block, ...] = ()

    @cached_property
    def elements(self) -> int:
        """Covered elements, padding left out."""
        return sum(_numel(b.source[1]) for b in (*self.blocks, *self.label_blocks))


def leading_slices(
    target: Layout, source: Layout, *, label_rows: Sequence[str] = (), tensors: int | None = None
) -> Coverage:
    """The coverage of a model that owns the leading channels of every tensor (HeteroFL, 3.2).

    Args:
        target: the layout that is merged into.
        source: the layout of the client's row; the same tensors in the same order, no dimension
            larger.
        label_rows: names of tensors whose first dimension is the class label.
        tensors: only the first so many entries are covered (all by default).

    Raises:
        ValueError: the layouts do not nest; names the tensor.
    """
    count = len(target.entries) if tensors is None else tensors
    if [e.name for e in target] != [e.name for e in source]:
        unlike = sorted({e.name for e in target} ^ {e.name for e in source})
        more = f" and {len(unlike) - 3} more" if len(unlike) > 3 else ""
        raise ValueError(f"the models differ in {', '.join(unlike[:3]) or 'order'}{more}")
    blocks: list[Block] = []
    label_blocks: list[Block] = []
    for wide, narrow in list(zip(target, source, strict=True))[:count]:
        if len(wide.shape) != len(narrow.shape) or any(
            n > w for n, w in zip(narrow.shape, wide.shape, strict=True)
        ):
            raise ValueError(
                f"{wide.name} is {list(narrow.shape)}, which is no slice of {list(wide.shape)}"
            )
        block = Block((wide.offset, wide.shape), (narrow.offset, narrow.shape), wide.name)
        (label_blocks if wide.name in label_rows else blocks).append(block)
    identity = target == source and not label_blocks  # blocks are kept for the ledger
    return Coverage(target.span(count), identity, tuple(blocks), tuple(label_blocks))


def take(target_row: Tensor, coverage: Coverage, out: Tensor) -> Tensor:
    """Copy the covered part of `target_row` (P,) into the client's row `out`: "send" on rows."""
    if coverage.identity:
        out[: coverage.span].copy_(target_row[: coverage.span], non_blocking=True)
        return out
    for block in (*coverage.blocks, *coverage.label_blocks):
        block.source_view(out).copy_(block.target_view(target_row), non_blocking=True)
    return out


class Merge:
    """A coverage-weighted mean under way.

    `add` the rows of this rank's clients, `count` every client of the federation that takes part
    (from metadata, the same on every rank), add up `partial` over the ranks, then `finish_`.

    Args:
        size: length of a target row, P.
        total: the sum of the weights of all clients of the merge; `fixed` scales by it.
        accumulate: how partial sums are held.
        device: of the rows.
    """

    def __init__(
        self, size: int, *, total: float, accumulate: Accumulate, device: torch.device
    ) -> None:
        dtype = torch.float64 if accumulate == "float64" else torch.int64
        self.partial = torch.zeros(size, dtype=dtype, device=device)
        self._fixed = accumulate == "fixed"
        self._total = total
        self._size = size
        # (coverage, labels) -> weight of the clients that have it; labels as a tuple, () =
        # unrestricted
        self._weights: dict[tuple[Coverage, tuple[int, ...]], float] = {}

    def add(
        self, row: Tensor, coverage: Coverage, *, weight: float, labels: tuple[int, ...] = ()
    ) -> None:
        """Add a client's row; with `fixed`, the caller leaves rows beyond `FIXED_LIMIT` out."""
        if coverage.identity:
            self._add(self.partial[: coverage.span], row[: coverage.span], weight)
            return
        for block in coverage.blocks:
            self._add(block.target_view(self.partial), block.source_view(row), weight)
        index = _label_index(labels, row.device)
        for block in coverage.label_blocks:
            target, source = block.target_view(self.partial), block.source_view(row)
            if labels:
                part = target.index_select(0, index)
                self._add(part, source.index_select(0, index), weight)
                target.index_copy_(0, index, part)
            else:
                self._add(target, source, weight)

    def _add(self, target: Tensor, source: Tensor, weight: float) -> None:
        if not self._fixed:
            target.add_(source, alpha=weight)
            return
        scaled = source.double().mul_(weight * (FIXED_SCALE / self._total)).round_()
        target.add_(scaled.to(torch.int64))

    def count(self, coverage: Coverage, *, weight: float, labels: tuple[int, ...] = ()) -> None:
        """Say that a client, of whatever rank, takes part with this coverage and weight."""
        key = (coverage, labels if coverage.label_blocks else ())
        self._weights[key] = self._weights.get(key, 0.0) + weight

    def finish_(self, row: Tensor) -> None:
        """Put the mean into `row` (P,) where somebody covers; elsewhere it keeps its value."""
        weight = self._uniform_weight()
        values = self.partial
        if self._fixed:
            values = values.double().mul_(self._total / FIXED_SCALE)
        if weight is not None:
            # One weight for all covered elements, which are the leading `span`: no count row is
            # needed.
            span = next(iter(self._weights))[0].span
            row[:span].copy_(values[:span].div_(weight))
            return
        counts = self._count_row()
        covered = counts > 0
        mean = values.div_(counts.masked_fill_(~covered, 1.0)).to(row.dtype)
        row.copy_(torch.where(covered, mean, row))

    def _uniform_weight(self) -> float | None:
        keys = list(self._weights)
        if len(keys) == 1 and keys[0][0].identity:
            return self._weights[keys[0]]
        return None

    def _count_row(self) -> Tensor:
        counts = torch.zeros(self._size, dtype=torch.float64, device=self.partial.device)
        for (coverage, labels), weight in self._weights.items():
            if coverage.identity:
                counts[: coverage.span] += weight
                continue
            for block in coverage.blocks:
                block.target_view(counts).add_(weight)
            for block in coverage.label_blocks:
                view = block.target_view(counts)
                if labels:
                    index = _label_index(labels, counts.device)
                    view.index_add_(0, index, torch.full_like(view[: len(labels)], weight))
                else:
                    view.add_(weight)
        return counts


@lru_cache(maxsize=4096)
def _label_index(labels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(labels, dtype=torch.int64, device=device)


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
