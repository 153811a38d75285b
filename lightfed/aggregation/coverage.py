"""Which part of a server model each client group covers, and the merge of clients into it.

A client may hold a narrower or a shallower model than the server, or train only the output rows of
the labels that it has. In all these cases its row *covers* a part of the server's row. `take`
copies that part to a client, and `merge_` puts the clients' weighted mean back, element by element:

    out[e] = sum_k a_k c_k[e] w_k[e] / sum_k a_k c_k[e]

where a_k is the weight of client k, w_k its row, and c_k[e] is 1 if the client covers element e and
0 otherwise. An element that no client covers keeps its old value.

The sums are independent of their order, so the result is independent of how clients are placed on
ranks: products of float32 values and whole weights are added up in float64, which is exact unless
the addends of one element span more than a factor of about 2^18 in magnitude.

`Coverage` relates one server model to layouts of clients, by the tables of lightfed_kernels.
`Coverages` builds one for each server model of a run when it is first needed.
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

# Rows in host memory are copied to the device this many at a time, so that a merge of many clients
# needs little device memory.
HOST_ROWS = 16


@dataclass(frozen=True, eq=False)
class Coverage:
    """The part of a target layout that rows of several source layouts cover.

    A source is identified by its position in the list that `build` was given.

    Attributes:
        target: The layout that rows are taken from and merged into.
        table: The kernels' table of the sources that fit.
        levels: The level of each fitting source in the table.
        elements: For each fitting source, how many elements it covers, without padding.
        copies: For each source that is a leading run of the target's row, the length of that run.
            Such a source is served by a plain copy.
        unfit: For each source whose rows are no slices of the target's, the reason.
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
        """Relate layouts whose tensors are leading slices of the target's (HeteroFL, section 3.2).

        Args:
            target: The layout of the server's row.
            sources: The layouts of the clients' rows.
            tensors: Names of the tensors to cover; None for all.
            groups: For tensors with grouped dimensions, such as attention heads, the number of
                groups of each dimension. A source has the leading part of every group.
            label_rows: Names of tensors whose first dimension is the class label.
            depths: Whether a source may lack tensors of the target.
            device: Where the tables are kept.

        Raises:
            ValueError: If no source fits. The message is the reason for the first one.
        """
        groups = groups or {}
        covered_names = {entry.name for entry in target}
        if tensors is not None:
            covered_names &= set(tensors)

        fit: list[int] = []
        unfit: dict[int, str] = {}
        for position, source in enumerate(sources):
            obstacle = _difference_in_names(target, source, covered_names, depths=depths)
            if obstacle is None:
                obstacle = _difference_in_shapes(target, source, groups)

            if obstacle is None:
                fit.append(position)
            else:
                unfit[position] = obstacle
        if not fit:
            raise ValueError(unfit[0])

        covered_parts = [sources[position].only(covered_names) for position in fit]
        table = SliceTable.build(
            target.only(covered_names),
            covered_parts,
            groups={name: counts for name, counts in groups.items() if name in covered_names},
            label_rows=[name for name in label_rows if name in covered_names],
            device=device,
        )

        levels: dict[int, int] = {}
        elements: dict[int, int] = {}
        copies: dict[int, int] = {}
        for level, position in enumerate(fit):
            levels[position] = level
            elements[position] = covered_parts[level].numel
            if level in table.runs:
                copies[position] = table.runs[level]

        return cls(target, table, levels=levels, elements=elements, copies=copies, unfit=unfit)

    def take(self, row: Tensor, source: int, out: Tensor) -> Tensor:
        """Copy the part of a server's row that a source covers into clients' rows.

        Args:
            row: The server's row, (P,).
            source: The position of the clients' layout.
            out: The row of one client, (P_k,), or rows of several, (K, P_k). They are written in
                place, and may be on another device than `row`.

        Returns:
            `out`.
        """
        if source in self.copies:
            # The whole model, or its first layers: a plain copy is faster than the kernel.
            size = self.copies[source]
            covered = out if size == out.shape[-1] else out[..., :size]
            # Not with `non_blocking`: the host reads its rows next.
            covered.copy_(row if size == len(row) else row[:size])
            return out

        out_on_device = out.to(row.device)
        num_rows = out_on_device.numel() // max(1, out_on_device.shape[-1])
        slice_take_(row, [out_on_device], self.table, [self.levels[source]] * num_rows)
        if out_on_device is not out:
            out.copy_(out_on_device)
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
        """Put the coverage-weighted mean of clients' rows into the server's row, in place.

        Elements that no client covers keep their value.

        Args:
            row: The server's row, (P,).
            sources: For each client of the merge, on any rank, the position of its layout.
            local: Which of these clients are on this rank, as indices into `sources`.
            rows: The rows of the clients on this rank, each (P_k,) on any device. They may also be
                given as one matrix, (K, P_k).
            weights: The weight a_k of each client of the merge.
            labels: For each client of the merge, the labels whose rows count; None for all.
            ranks: The ranks that merge together; None if this one is alone.
        """

        def members(positions: Sequence[int]) -> Members:
            # All clients are named each time: the divisor is the weight of all of them, while only
            # the rows at these positions are added up here.
            return Members.build(
                self.table,
                [self.levels[source] for source in sources],
                weights=weights,
                labels=labels if self.table.num_labels else None,
                local=positions,
            )

        def on_device(chosen: slice) -> list[Tensor]:
            # Not with `non_blocking`: the host may write its rows next, as FedKD does.
            return [client_row.to(row.device) for client_row in rows[chosen]]

        any_elsewhere = any(client_row.device != row.device for client_row in rows)
        # If all rows are at hand, one kernel adds up and divides.
        if ranks is None and not any_elsewhere:
            slice_merge_(row, on_device(slice(None)), members(local))
            return

        # A rank without clients takes part with an empty sum: the others wait for it.
        num_local = max(len(local), 1)
        batch_size = HOST_ROWS if any_elsewhere else num_local
        sums: Tensor | None = None
        for start in range(0, num_local, batch_size):
            batch = slice(start, start + batch_size)
            batch_sums = slice_sum(on_device(batch), members(local[batch]))
            if sums is None:
                sums = batch_sums
            else:
                sums += batch_sums
        assert sums is not None

        # One collective for all elements. Every rank divides the same sums, so all have one result.
        if ranks is not None:
            sums = ranks.sum_(sums)
        slice_finish_(row, sums, members([]))


def _difference_in_names(
    target: Layout, source: Layout, covered_names: Collection[str], *, depths: bool
) -> str | None:
    """Return how the names of a layout's tensors differ from the target's; None if they fit.

    Args:
        target: The layout of the server's row.
        source: The layout of a client's row.
        covered_names: The tensors to cover.
        depths: Whether the source may lack tensors, as long as it has one to cover.
    """
    target_names = [entry.name for entry in target]
    source_names = [entry.name for entry in source]
    if not depths:
        if target_names == source_names:
            return None
        in_one_only = sorted(set(target_names) ^ set(source_names))
        if in_one_only:
            return f"the models differ in {_first_names(in_one_only)}"
        return "the models differ in order"

    surplus = sorted(set(source_names) - set(target_names))
    if surplus:
        return f"the server model lacks {_first_names(surplus)}"
    if not set(source_names) & set(covered_names):
        return f"it lacks {_first_names(sorted(covered_names))}"
    return None


def _first_names(names: Sequence[str]) -> str:
    """Return the first three names and the number of the others."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text


def _difference_in_shapes(
    target: Layout, source: Layout, groups: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Return why a layout's tensors are not leading slices of the target's; None if they are."""
    target_entries = {entry.name: entry for entry in target}
    for narrow in source:
        wide = target_entries[narrow.name]
        is_slice = len(narrow.shape) == len(wide.shape) and all(
            narrow_size <= wide_size
            for narrow_size, wide_size in zip(narrow.shape, wide.shape, strict=True)
        )
        if not is_slice:
            return f"{wide.name} is {list(narrow.shape)}, which is no slice of {list(wide.shape)}"

        group_counts = groups.get(wide.name, ())
        for size, count in zip(narrow.shape, group_counts, strict=False):
            if size % count:
                return (
                    f"{wide.name} is {list(narrow.shape)}, which leaves no whole groups of "
                    f"{group_counts}"
                )
    return None


@dataclass(frozen=True)
class Parts:
    """Which parts of a server model are sent and merged.

    Attributes:
        buffers: Whether its float buffers, such as BatchNorm's statistics, are among them.
        tensors: The names of its tensors that are; None for all.
        personal: The names of tensors that stay with the clients, whatever else is asked for.
    """

    buffers: bool = True
    tensors: frozenset[str] | None = None
    personal: frozenset[str] = frozenset()

    @property
    def integers(self) -> bool:
        """Whether integer buffers are sent: only together with a whole model."""
        return self.buffers and self.tensors is None and not self.personal


class Coverages:
    """The coverage of every server model of a run by the rows of every client group.

    Args:
        layouts: The layout of each group's rows.
        names: The name of each group, for errors.
        label_rows: Tensors of which a client covers only the rows of its labels; None if clients
            cover all rows.
        depths: Whether groups may lack tensors of a server model.
        method: The name of the algorithm, for errors.
        device: Where the tables are kept.
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
        self._layouts = layouts
        self._names = names
        self._label_rows = label_rows
        self._depths = depths
        self._method = method
        self._device = device
        # By the identity of a server model's layout, and the parts sent. A coverage refers to the
        # layout, so the identity cannot be used again for another one.
        self._built: dict[tuple[int, Parts], Coverage] = {}

    def coverage(self, model: ServerModel, parts: Parts) -> Coverage:
        """Return the coverage of parts of a server model by the groups that fit.

        Raises:
            UserError: If no group fits, or the parts name a tensor that the model does not have.
        """
        layout = model.layout.floats
        key = (id(layout), parts)
        if key not in self._built:
            self._built[key] = self._build(model, parts)
        return self._built[key]

    def _build(self, model: ServerModel, parts: Parts) -> Coverage:
        layout = model.layout.floats
        self._check_names(model, parts)

        covered_names = {entry.name for entry in layout}
        if parts.tensors is not None:
            covered_names = set(parts.tensors)
        covered_names -= parts.personal
        if not parts.buffers:
            covered_names -= {entry.name for entry in layout.entries[model.layout.parameters :]}

        label_rows: list[str] = []
        if self._label_rows is not None:
            label_rows = [*self._label_rows, *model.layout.label_rows]

        sources = [
            shared(model, group, group_layout.floats)
            for group, group_layout in enumerate(self._layouts)
        ]
        try:
            return Coverage.build(
                layout,
                sources,
                tensors=covered_names,
                groups=dict(model.layout.groups),
                label_rows=label_rows,
                depths=self._depths,
                device=self._device,
            )
        except ValueError as error:
            raise self._refusal("the groups do not fit", str(error)) from error

    def _check_names(self, model: ServerModel, parts: Parts) -> None:
        """Refuse names of tensors that a server model does not have."""
        if parts.tensors is None:
            return
        layout = model.layout.floats
        known_names = {entry.name for entry in (*layout, *model.layout.integers)}
        for name in sorted(parts.tensors - known_names):
            raise UserError(
                key="model.algorithm",
                found=f"its server model has no tensor {name!r}",
                fix=f"give whole names, such as {layout.entries[0].name!r}",
            )

    def fitting(self, model: ServerModel, group: int, parts: Parts) -> Coverage:
        """Return the coverage of parts of a server model, after a check that one group fits.

        Raises:
            UserError: If the group's rows are no slices of the model's. It names the group and the
                layer.
        """
        coverage = self.coverage(model, parts)
        if group in coverage.unfit:
            name = self._names[group]
            raise self._refusal(f"group {name} does not fit", coverage.unfit[group])
        return coverage

    def _refusal(self, what_does_not_fit: str, why: str) -> UserError:
        return UserError(
            key="model.clients",
            found=f"{what_does_not_fit} into the server model: {why}",
            fix=f"use models that {self._method} can nest",
        )

    def bytes(self, model: ServerModel, group: int, parts: Parts) -> float:
        """Return the bytes that a client of a group sends or gets: 4 per float, 8 per integer.

        Raises:
            UserError: If the group does not fit.
        """
        num_floats = self.fitting(model, group, parts).elements[group]
        num_integers = 0
        if parts.integers:
            num_integers = shared(model, group, self._layouts[group].integers).numel
        return 4 * num_floats + 8 * num_integers

    def reorder_(self, model: ServerModel, order: Callable[[int], Tensor]) -> None:
        """Reorder the units of a server model in place, along each axis that some group narrows.

        Args:
            model: The server's model.
            order: Given the width of a layer, returns the old position of each of its units, as a
                tensor of shape (width,).
        """
        group_shapes: dict[str, list[tuple[int, ...]]] = {}
        for group, group_layout in enumerate(self._layouts):
            for entry in shared(model, group, group_layout.floats):
                group_shapes.setdefault(entry.name, []).append(entry.shape)

        # An axis that no group narrows is whole everywhere, so the order of its units is free, and
        # it may be one that must not be permuted, such as that of the inputs.
        for name, tensor in model.layout.floats.views(model.floats).items():
            sizes_per_axis = zip(*group_shapes[name], strict=True)
            for axis, sizes in enumerate(sizes_per_axis):
                width = tensor.shape[axis]
                if min(sizes) < width:
                    old_positions = order(width).to(tensor.device)
                    tensor.copy_(tensor.index_select(axis, old_positions))

    def take(self, model: ServerModel, group: int, parts: Parts, row: Row) -> None:
        """Copy what a group covers of a server model into a row, or a block of rows, of the group.

        Raises:
            UserError: If the group does not fit.
        """
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
        """Put the coverage-weighted mean of clients' rows into a server model, in place.

        Elements that no client covers keep their value. An integer buffer becomes the largest of
        the clients'.

        Args:
            into: The server's model.
            parts: The parts of it that are merged.
            groups: The group of each client of the merge, on any rank.
            local: Which of these clients are on this rank, as indices into `groups`.
            rows: The rows of the clients on this rank, on any device; a block, if they lie so.
            weights: The weight of each client of the merge.
            labels: The labels of each client of the merge; None if all rows count.
            ranks: The ranks that merge together.

        Raises:
            UserError: If no group fits.
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
            local_rows = rows.each() if isinstance(rows, Row) else rows
            self._merge_integers_(into, [groups[client] for client in local], local_rows, ranks)

    def _merge_integers_(
        self,
        into: ServerModel,
        local_groups: Sequence[int],
        local_rows: Sequence[Row],
        ranks: Ranks,
    ) -> None:
        """Put the largest of the clients' integer buffers into a server model."""
        # A mean of whole numbers, such as counts of batches, would not be whole.
        largest = torch.full_like(into.integers, NOTHING)
        for group, row in zip(local_groups, local_rows, strict=True):
            client_integers = integers_of(into, group, self._layouts[group], row)
            torch.maximum(largest, client_integers.to(largest.device), out=largest)

        largest = ranks.max_(largest)
        into.integers.copy_(torch.where(largest == NOTHING, into.integers, largest))
