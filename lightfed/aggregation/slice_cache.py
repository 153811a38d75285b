"""Coverages of the server's models by the groups, built on first use and cached."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightfed.aggregation.client_slices import Accumulate, Coverage
from lightfed.distributed.collectives import Ranks
from lightfed.state.parts import NOTHING, integers_of, put_integers, shared
from lightfed.state.rows import ModelLayout, Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError


@dataclass(frozen=True)
class Parts:
    """Which parts of a server model are sent: tensors by name (None: all), and its buffers."""

    buffers: bool = True
    tensors: frozenset[str] | None = None

    @classmethod
    def of(cls, *, buffers: bool, tensors: Collection[str] | None) -> "Parts":
        return cls(buffers, None if tensors is None else frozenset(tensors))

    @property
    def integers(self) -> bool:
        """Integer buffers are sent only with the whole model."""
        return self.buffers and self.tensors is None


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
        accumulate: Accumulate,
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
            accumulate=accumulate,
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
