"""slice_merge and slice_take: HeteroFL's aggregation and distribution over five widths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from lightfed_kernels.layout import Layout
from lightfed_kernels.merge import slice_merge_, slice_take_
from lightfed_kernels.reference import slices as reference
from lightfed_kernels.slices import Members, SliceTable
from torch import Tensor

from bench import official, rivals
from bench.case import COMPILED, OFFICIAL, OURS, Bind, Case, Run
from bench.cases.common import Source, listed, plural
from bench.models import CLASSES, RATES, Model

OPERATIONS = ("slice_merge", "slice_take")

# torch.compile takes a graph of every client; more of them take minutes.
COMPILED_CLIENTS = 10


@dataclass(frozen=True)
class Inputs:
    """The global row; the clients' rows, their levels, layouts and the two labels of each."""

    model: Model
    table: SliceTable
    row: Tensor
    clients: list[Tensor]
    level: list[int]
    layouts: list[Layout]
    labels: list[list[int]]

    def views(self, row: Tensor, client: int, *, own: bool, labels: bool) -> list[Tensor]:
        """The parts that a client covers, in a row of the target or in its `own`.

        With `labels`, tensors whose rows are labels are cut to the rows that the client holds.
        """
        target, layout = self.model.layout, self.layouts[client]
        views: list[Tensor] = []
        for wide, narrow in zip(target, layout, strict=True):
            leading = tuple(slice(size) for size in narrow.shape)
            view = layout.view(row, narrow) if own else target.view(row, wide)[leading]
            held = labels and wide.name in self.model.label_rows
            views.extend([view[label] for label in self.labels[client]] if held else [view])
        return views


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    levels = [model.level(rate) for rate in RATES]
    level = [k % len(levels) for k in range(clients)]
    layouts = [levels[own] for own in level]
    labels = [sorted({k % CLASSES, (k + 1) % CLASSES}) for k in range(clients)]
    table = SliceTable.build(model.layout, levels, label_rows=model.label_rows, device=device)
    covered = sum(layout.numel for layout in layouts)

    def build(seed: int) -> Inputs:
        first = 1000 * seed
        rows = [Source(x, first + k, dtype, device).row() for k, x in enumerate(layouts)]
        row = Source(model.layout, first + clients, dtype, device).row()
        return Inputs(model, table, row, rows, level, layouts, labels)

    codes: dict[str, Bind] = {
        OURS: _merge,
        OFFICIAL: _merge_official,
        "foreach": _merge_foreach,
        "flat": _merge_flat,
    }
    if clients <= COMPILED_CLIENTS:
        codes[COMPILED] = partial(_merge_flat, compiled=True)
    merge = Case(
        operation="slice_merge",
        model=model.name,
        shape=plural(clients, "client"),
        dtype=dtype,
        build=build,
        reference=_merge_reference,
        codes=codes,
        floor_bytes=_merged(model, layouts, labels) * dtype.itemsize,
        input_bytes=8 * (covered + 2 * model.layout.numel) * dtype.itemsize,
    )
    take = replace(
        merge,
        operation="slice_take",
        reference=_take_reference,
        codes={
            OURS: _take,
            OFFICIAL: _take_official,
            "foreach": _take_foreach,
            "flat": _take_flat,
        },
        # Client 0 is of the full width, so that the whole row is read.
        floor_bytes=(covered + model.layout.numel) * dtype.itemsize,
        exact=True,
        rival_tolerance=0.0,
    )
    return [merge, take]


def _merged(model: Model, layouts: Sequence[Layout], labels: Sequence[Sequence[int]]) -> int:
    """Elements that a merge reads or writes: of tensors whose rows are labels, only those held."""

    def held(layout: Layout, share: float) -> float:
        return sum(e.numel * (share if e.name in model.label_rows else 1) for e in layout)

    read = sum(held(own, len(mine) / CLASSES) for own, mine in zip(layouts, labels, strict=True))
    written = held(model.layout, len({label for mine in labels for label in mine}) / CLASSES)
    return round(read + written)


def _merge(given: Inputs) -> Run:
    members = Members.build(given.table, given.level, labels=given.labels)
    return lambda: slice_merge_(given.row, given.clients, members)


def _merge_official(given: Inputs) -> Run:
    model = given.model.layout.views(given.row)
    rows = [own.views(row) for own, row in zip(given.layouts, given.clients, strict=True)]
    indices = _indices(given)
    labels = [torch.tensor(own, device=given.row.device) for own in given.labels]
    return lambda: official.heterofl_combine(model, rows, indices, labels, given.model.label_rows)


def _indices(given: Inputs) -> list[official.Indices]:
    """Every client's leading indices."""
    return [
        official.heterofl_split({entry.name: entry.shape for entry in own}, given.row.device)
        for own in given.layouts
    ]


def _merge_foreach(given: Inputs) -> Run:
    total, count = torch.zeros_like(given.row), torch.zeros_like(given.row)
    clients = [
        (
            given.views(total, k, own=False, labels=True),
            given.views(count, k, own=False, labels=True),
            given.views(row, k, own=True, labels=True),
        )
        for k, row in enumerate(given.clients)
    ]
    parts, totals, counts = listed(given.model.layout, (given.row, total, count))
    return lambda: rivals.foreach_merge(parts, totals, counts, clients)


def _merge_flat(given: Inputs, *, compiled: bool = False) -> Run:
    function = rivals.compiled(rivals.flat_merge) if compiled else rivals.flat_merge
    pairs = [_places(given, k, labels=True) for k in range(len(given.clients))]
    places, own = [place for place, _ in pairs], [mine for _, mine in pairs]
    return lambda: function(given.row, given.clients, places, own)


def _places(given: Inputs, client: int, *, labels: bool) -> tuple[Tensor, Tensor]:
    """Where the elements of a client's row belong in the global row, and which they are."""
    layouts = (given.model.layout, given.layouts[client])
    every, mine = (torch.arange(layout.size, device=given.row.device) for layout in layouts)
    places = given.views(every, client, own=False, labels=labels)
    elements = given.views(mine, client, own=True, labels=labels)
    return torch.cat([x.reshape(-1) for x in places]), torch.cat([x.reshape(-1) for x in elements])


def _merge_reference(given: Inputs) -> Tensor:
    return reference.merge(
        given.row, given.model.layout, given.clients, given.layouts,
        labels=given.labels, label_rows=given.model.label_rows,
    )  # fmt: skip


def _take(given: Inputs) -> Run:
    outs = [torch.zeros_like(row) for row in given.clients]

    def run() -> list[Tensor]:
        slice_take_(given.row, outs, given.table, given.level)
        return outs

    return run


def _take_official(given: Inputs) -> Run:
    model, indices = given.model.layout.views(given.row), _indices(given)
    return lambda: official.heterofl_distribute(model, indices)


def _take_foreach(given: Inputs) -> Run:
    outs = [torch.zeros_like(row) for row in given.clients]
    into: list[Tensor] = []
    views: list[Tensor] = []
    for k, out in enumerate(outs):
        into += given.views(out, k, own=True, labels=False)
        views += given.views(given.row, k, own=False, labels=False)

    def run() -> list[Tensor]:
        torch._foreach_copy_(into, views)
        return outs

    return run


def _take_flat(given: Inputs) -> Run:
    outs = [torch.zeros_like(row) for row in given.clients]
    places = [_places(given, k, labels=False) for k in range(len(outs))]
    return lambda: [
        out.index_copy_(0, mine, given.row[place])
        for out, (place, mine) in zip(outs, places, strict=True)
    ]


def _take_reference(given: Inputs) -> Tensor:
    layout = given.model.layout
    return torch.cat([reference.take(given.row, layout, own) for own in given.layouts])
