"""Which part of a server model each group covers: `take` one client's part, `merge` many.

    out[e] = sum_k a_k c_k[e] w_k[e] / sum_k a_k c_k[e];   uncovered elements keep their old value

Widths, depths and label rows are all coverages. The tables and sums are those of lightfed_kernels.
The sums do not depend on order, so the result does not depend on how clients are placed on ranks.
float64 over integer weights is exact unless the addends of one element span more than about 2^18 in
magnitude.

`Coverages` builds those of the server's models on first use.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from lightfed_kernels import (
    Layout,
    Members,
    SliceTable,
    slice_finish_,
    slice_merge_,
    slice_sum,
    slice_take_,
)
from torch import Tensor

from lightfed.distributed.collectives import Ranks
from lightfed.state.rows import ModelLayout, Row
from lightfed.state.server_model import NOTHING, ServerModel, integers_of, put_integers, shared
from lightfed.utils.errors import UserError

# Number of host rows that are copied to the device at a time.
HOST_ROWS = 16


@dataclass(frozen=True, eq=False)
class Coverage:
    """The part of a target layout covered by rows of several source layouts.

    Attributes:
        target: as given.
        table: of the sources that fit.
        levels: position of a source -> its level in the table.
        elements: position of a source -> number of elements that it covers, without padding.
        copies: sources that are a leading part of the target's row -> its length. For them "send"
            is a plain copy.
        unfit: position of a source -> why its rows are not slices of the target's.
    """

    target: Layout
    table: SliceTable
    levels: Mapping[int, int]
    elements: Mapping[int, int]
    copies: Mapping[int, int]
    unfit: Mapping[int, str]

    @classmethod
    def build(
        cls,
        target: Layout,
        sources: Sequence[Layout],
        *,
        tensors: Collection[str] | None = None,
        groups: Mapping[str, tuple[int, ...]] | None = None,
        label_rows: Sequence[str] = (),
        depths: bool = False,
        device: torch.device | str = "cpu",
    ) -> "Coverage":
        """Relate layouts whose tensors are leading slices of the target's (HeteroFL, 3.2).

        `tensors` names those to cover (all by default). `groups` has tensors with grouped
        dimensions: the slice is the leading part of every group. `label_rows` are tensors whose
        first dimension is the class label. With `depths` sources may lack tensors of the target. A
        ValueError if none of the sources fits; says why the first does not.
        """
        groups = groups or {}
        names = {entry.name for entry in target}
        kept = names if tensors is None else names & set(tensors)
        why = {
            k: _unlike_names(target, source, kept if depths else None)
            or _unlike_shapes(target, source, groups)
            for k, source in enumerate(sources)
        }
        fit = [k for k, reason in why.items() if reason is None]
        unfit = {k: reason for k, reason in why.items() if reason is not None}
        if not fit:
            raise ValueError(unfit[0])
        table = SliceTable.build(
            target.only(kept),
            [sources[k].only(kept) for k in fit],
            groups={name: counts for name, counts in groups.items() if name in kept},
            label_rows=[name for name in label_rows if name in kept],
            device=device,
        )
        return cls(
            target,
            table,
            levels={k: level for level, k in enumerate(fit)},
            elements={k: sources[k].only(kept).numel for k in fit},
            copies={k: table.runs[i] for i, k in enumerate(fit) if i in table.runs},
            unfit=unfit,
        )

    def take(self, row: Tensor, source: int, out: Tensor) -> Tensor:
        """Copy the part of the target's `row` (P,) that a source covers into `out`: "send" on rows.

        The rows may be on different devices. `out` may be a matrix of rows.
        """
        if source in self.copies:
            size = self.copies[source]
            part = out if size == out.shape[-1] else out[..., :size]
            part.copy_(row if size == len(row) else row[:size])  # the host reads its rows next
            return out
        here = out.to(row.device)
        rows = here.numel() // max(1, here.shape[-1])
        slice_take_(row, [here], self.table, [self.levels[source]] * rows)
        if here is not out:
            out.copy_(here)
        return out

    def merge_(
        self,
        row: Tensor,
        sources: Sequence[int],
        local: Sequence[int],
        rows: Sequence[Tensor] | Tensor,
        *,
        weights: Sequence[float],
        labels: Sequence[Sequence[int] | None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Put the coverage-weighted mean of clients' rows into the target's `row` (P,).

        Uncovered elements keep their value. `sources` are, per client of the merge, the position of
        its layout; `local` are the positions of this rank's clients among all, and `rows` are
        theirs, on any device, as a matrix (K, P) if they lie so. `labels`, per client, says if only
        rows of its labels count (None: all). `ranks` merge together; None for a single one.
        """

        def members(local: Sequence[int]) -> Members:
            levels = [self.levels[k] for k in sources]
            own = labels if self.table.num_labels else None
            return Members.build(self.table, levels, weights=weights, labels=own, local=local)

        def part(chosen: slice) -> list[Tensor]:
            return [own.to(row.device, non_blocking=True) for own in rows[chosen]]

        away = any(own.device != row.device for own in rows)
        if ranks is None and not away:
            slice_merge_(row, part(slice(None)), members(local))
            return
        step = HOST_ROWS if away else max(len(local), 1)
        first, *others = [slice(i, i + step) for i in range(0, max(len(local), 1), step)]
        sums = slice_sum(part(first), members(local[first]))
        for batch in others:
            sums += slice_sum(part(batch), members(local[batch]))
        slice_finish_(row, sums if ranks is None else ranks.sum_(sums), members([]))


def _unlike_names(target: Layout, source: Layout, kept: Collection[str] | None) -> str | None:
    """Why the tensors of a layout are not (some of) the target's; None if they are.

    `kept` are the tensors to cover, if a source may lack some; None if it may not.
    """
    theirs, own = [e.name for e in target], [e.name for e in source]
    if kept is None:
        unlike = sorted({*theirs} ^ {*own})
        return None if theirs == own else f"the models differ in {_some(unlike) or 'order'}"
    surplus = sorted({*own} - {*theirs})
    if surplus:
        return f"the server model lacks {_some(surplus)}"
    return None if {*own} & {*kept} else f"it lacks {_some(sorted(kept))}"


def _some(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _unlike_shapes(
    target: Layout, source: Layout, groups: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Why the tensors of a layout are not leading slices of the target's; None if they are."""
    targets = {entry.name: entry for entry in target}
    for narrow in source:
        wide = targets[narrow.name]
        if len(wide.shape) != len(narrow.shape) or any(
            n > w for n, w in zip(narrow.shape, wide.shape, strict=True)
        ):
            return f"{wide.name} is {list(narrow.shape)}, which is no slice of {list(wide.shape)}"
        counts = groups.get(wide.name, ())
        if any(size % count for size, count in zip(narrow.shape, counts, strict=False)):
            return f"{wide.name} is {list(narrow.shape)}, which leaves no whole groups of {counts}"
    return None


@dataclass(frozen=True)
class Parts:
    """Which parts of a server model are sent: tensors by name (None: all), and its buffers.

    Those of `personal` names are never sent.
    """

    buffers: bool = True
    tensors: frozenset[str] | None = None
    personal: frozenset[str] = frozenset()

    @property
    def integers(self) -> bool:
        """Integer buffers are sent only with the whole model."""
        return self.buffers and self.tensors is None and not self.personal


class Coverages:
    """The part of a server model that every group's rows cover.

    Of `label_rows` a client covers only the rows of its labels. With `depths` groups may lack
    tensors of a server model. `method` is the algorithm's name, for errors.
    """

    def __init__(
        self,
        layouts: Sequence[ModelLayout],
        names: Sequence[str],
        *,
        label_rows: Sequence[str] | None,
        depths: bool,
        method: str,
        device: torch.device,
    ) -> None:
        self._layouts, self._names, self._label_rows = layouts, names, label_rows
        self._depths, self._method, self._device = depths, method, device
        # Keyed by the server model's layout (which a coverage keeps alive) and the parts sent.
        self._made: dict[tuple[int, Parts], Coverage] = {}

    def coverage(self, model: ServerModel, parts: Parts) -> Coverage:
        """The coverage of a server model by the groups that fit.

        A UserError names the layer if none fits, or one fits in a way that tables cannot describe.
        """
        layout = model.layout.floats
        made = self._made.get((id(layout), parts))
        if made is not None:
            return made
        buffers = {entry.name for entry in layout.entries[model.layout.parameters :]}
        names = {entry.name for entry in layout} if parts.tensors is None else parts.tensors
        for name in sorted(names - {entry.name for entry in (*layout, *model.layout.integers)}):
            found = f"its server model has no tensor {name!r}"
            fix = f"give whole names, such as {layout.entries[0].name!r}"
            raise UserError("model.algorithm", found, fix)
        names = names - parts.personal
        rows = () if self._label_rows is None else (*self._label_rows, *model.layout.label_rows)
        try:
            made = Coverage.build(
                layout,
                [shared(model, i, own.floats) for i, own in enumerate(self._layouts)],
                tensors=names if parts.buffers else names - buffers,
                groups=dict(model.layout.groups),
                label_rows=rows,
                depths=self._depths,
                device=self._device,
            )
        except ValueError as error:
            raise self._refusal("the groups do not fit", str(error)) from error
        self._made[id(layout), parts] = made
        return made

    def fitting(self, model: ServerModel, group: int, parts: Parts) -> Coverage:
        """The coverage of a server model, checked for one group.

        A UserError names group and layer if the group's rows are not slices of the model.
        """
        coverage = self.coverage(model, parts)
        if group in coverage.unfit:
            name = self._names[group]
            raise self._refusal(f"group {name} does not fit", coverage.unfit[group])
        return coverage

    def _refusal(self, who: str, why: str) -> UserError:
        return UserError(
            "model.clients",
            f"{who} into the server model: {why}",
            f"use models that {self._method} can nest",
        )

    def bytes(self, model: ServerModel, group: int, parts: Parts) -> float:
        """Client bytes of the part that a group covers: 4 per float, 8 per integer."""
        floats = self.fitting(model, group, parts).elements[group]
        integers = shared(model, group, self._layouts[group].integers).numel
        return 4 * floats + 8 * integers * parts.integers

    def reorder_(self, model: ServerModel, order: Callable[[int], Tensor]) -> None:
        """Reorder a server model's units along every axis that is narrower in some group.

        `order` gives for the width of a layer the old position (width,) of each of its units.
        """
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for group, own in enumerate(self._layouts):
            for entry in shared(model, group, own.floats):
                shapes.setdefault(entry.name, []).append(entry.shape)
        for name, view in model.layout.floats.views(model.floats).items():
            for axis, sizes in enumerate(zip(*shapes[name], strict=True)):
                if min(sizes) < view.shape[axis]:
                    positions = order(view.shape[axis]).to(view.device)
                    view.copy_(view.index_select(axis, positions))

    def take(self, model: ServerModel, group: int, parts: Parts, row: Row) -> None:
        """Copy what a group covers of a model's parts into its rows; errors as of `fitting`."""
        self.fitting(model, group, parts).take(model.floats, group, row.floats)
        if parts.integers and model.integers.numel():
            put_integers(model, group, self._layouts[group], row)

    def merge_(
        self,
        into: ServerModel,
        parts: Parts,
        groups: Sequence[int],
        local: Sequence[int],
        rows: Sequence[Row] | Row,
        *,
        weights: Sequence[float],
        labels: Sequence[Sequence[int]] | None,
        ranks: Ranks,
    ) -> None:
        """Put the coverage-weighted mean of clients' rows into a server model.

        Uncovered elements keep their value. Integers become the largest of the clients'. `groups`,
        `weights` and `labels` (None: all rows) are those of every client; `local` are the positions
        of this rank's clients among all. Rows are theirs, on any device, as a block if they lie so.
        """
        self.coverage(into, parts).merge_(
            into.floats,
            groups,
            local,
            rows.floats if isinstance(rows, Row) else [row.floats for row in rows],
            weights=weights,
            labels=labels,
            ranks=None if ranks.alone else ranks,
        )
        if parts.integers and into.integers.numel():
            largest = torch.full_like(into.integers, NOTHING)
            each = rows.each() if isinstance(rows, Row) else rows
            for i, row in zip(local, each, strict=True):
                theirs = integers_of(into, groups[i], self._layouts[groups[i]], row)
                torch.maximum(largest, theirs.to(largest.device), out=largest)
            largest = ranks.max_(largest)
            into.integers.copy_(torch.where(largest == NOTHING, into.integers, largest))
