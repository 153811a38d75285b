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
    """What HeteroFL's operations take.

    Attributes:
        model: The family of models.
        table: The table of its levels.
        row: (P,) the global row.
        clients: The clients' rows.
        level: The level of every client.
        layouts: The layout of every client.
        labels: The two labels that every client holds.
    """

    model: Model
    table: SliceTable
    row: Tensor
    clients: list[Tensor]
    level: list[int]
    layouts: list[Layout]
    labels: list[list[int]]

    def views(self, row: Tensor, client: int, *, own: bool, labels: bool) -> list[Tensor]:
        """Return views of what a client covers.

        Args:
            row: A row of the target, or of the client.
            client: The client.
            own: Whether the row is the client's.
            labels: Whether to cut tensors whose rows are labels to the rows that the client holds.
        """
        target = self.model.layout
        layout = self.layouts[client]
        views: list[Tensor] = []
        for wide, narrow in zip(target, layout, strict=True):
            if own:
                view = layout.view(row, narrow)
            else:
                leading = tuple(slice(size) for size in narrow.shape)
                view = target.view(row, wide)[leading]
            if labels and wide.name in self.model.label_rows:
                views += [view[label] for label in self.labels[client]]
            else:
                views.append(view)
        return views


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Return the cases of some clients, which have the five widths in turn."""
    levels = [model.level(rate) for rate in RATES]
    level = [k % len(levels) for k in range(clients)]
    layouts = [levels[level_of_client] for level_of_client in level]
    labels = [sorted({k % CLASSES, (k + 1) % CLASSES}) for k in range(clients)]
    table = SliceTable.build(model.layout, levels, label_rows=model.label_rows, device=device)
    covered = sum(layout.numel for layout in layouts)

    def build(seed: int) -> Inputs:
        first_seed = 1000 * seed
        rows = []
        for k, layout in enumerate(layouts):
            rows.append(Source(layout, first_seed + k, dtype, device).row())
        row = Source(model.layout, first_seed + clients, dtype, device).row()
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
    """Return how many elements a merge reads or writes.

    Of tensors whose rows are labels, these are only the rows that somebody holds.

    Args:
        model: The family of models.
        layouts: The layout of every client.
        labels: The labels of every client.
    """

    def held(layout: Layout, labels: set[int]) -> float:
        elements = 0.0
        for entry in layout:
            share = len(labels) / CLASSES if entry.name in model.label_rows else 1
            elements += entry.numel * share
        return elements

    held_by_somebody: set[int] = set()
    read = 0.0
    for layout, labels_of_client in zip(layouts, labels, strict=True):
        held_by_somebody |= set(labels_of_client)
        read += held(layout, set(labels_of_client))
    written = held(model.layout, held_by_somebody)
    return round(read + written)


def _merge(inputs: Inputs) -> Run:
    members = Members.build(inputs.table, inputs.level, labels=inputs.labels)
    return lambda: slice_merge_(inputs.row, inputs.clients, members)


def _merge_official(inputs: Inputs) -> Run:
    model = inputs.model.layout.views(inputs.row)
    rows = []
    for layout, row in zip(inputs.layouts, inputs.clients, strict=True):
        rows.append(layout.views(row))
    indices = _indices(inputs)
    labels = [torch.tensor(held, device=inputs.row.device) for held in inputs.labels]
    return lambda: official.heterofl_combine(model, rows, indices, labels, inputs.model.label_rows)


def _indices(inputs: Inputs) -> list[official.Indices]:
    """Return every client's leading indices."""
    indices = []
    for layout in inputs.layouts:
        shapes = {entry.name: entry.shape for entry in layout}
        indices.append(official.heterofl_split(shapes, inputs.row.device))
    return indices


def _merge_foreach(inputs: Inputs) -> Run:
    total = torch.zeros_like(inputs.row)
    count = torch.zeros_like(inputs.row)
    clients = []
    for k, row in enumerate(inputs.clients):
        totals_of_client = inputs.views(total, k, own=False, labels=True)
        counts_of_client = inputs.views(count, k, own=False, labels=True)
        tensors_of_client = inputs.views(row, k, own=True, labels=True)
        clients.append((totals_of_client, counts_of_client, tensors_of_client))
    parts, totals, counts = listed(inputs.model.layout, (inputs.row, total, count))
    return lambda: rivals.foreach_merge(parts, totals, counts, clients)


def _merge_flat(inputs: Inputs, *, compiled: bool = False) -> Run:
    function = rivals.compiled(rivals.flat_merge) if compiled else rivals.flat_merge
    places = []
    own = []
    for k in range(len(inputs.clients)):
        places_of_client, own_of_client = _places(inputs, k, labels=True)
        places.append(places_of_client)
        own.append(own_of_client)
    return lambda: function(inputs.row, inputs.clients, places, own)


def _places(inputs: Inputs, client: int, *, labels: bool) -> tuple[Tensor, Tensor]:
    """Return where the elements of a client's row belong in the global row, and which they are."""
    device = inputs.row.device
    positions = torch.arange(inputs.model.layout.size, device=device)
    own_positions = torch.arange(inputs.layouts[client].size, device=device)
    places = inputs.views(positions, client, own=False, labels=labels)
    elements = inputs.views(own_positions, client, own=True, labels=labels)
    return (
        torch.cat([place.reshape(-1) for place in places]),
        torch.cat([element.reshape(-1) for element in elements]),
    )


def _merge_reference(inputs: Inputs) -> Tensor:
    return reference.merge(
        inputs.row, inputs.model.layout, inputs.clients, inputs.layouts,
        labels=inputs.labels, label_rows=inputs.model.label_rows,
    )  # fmt: skip


def _take(inputs: Inputs) -> Run:
    outs = [torch.zeros_like(row) for row in inputs.clients]

    def run() -> list[Tensor]:
        slice_take_(inputs.row, outs, inputs.table, inputs.level)
        return outs

    return run


def _take_official(inputs: Inputs) -> Run:
    model = inputs.model.layout.views(inputs.row)
    indices = _indices(inputs)
    return lambda: official.heterofl_distribute(model, indices)


def _take_foreach(inputs: Inputs) -> Run:
    outs = [torch.zeros_like(row) for row in inputs.clients]
    into: list[Tensor] = []
    views: list[Tensor] = []
    for k, out in enumerate(outs):
        into += inputs.views(out, k, own=True, labels=False)
        views += inputs.views(inputs.row, k, own=False, labels=False)

    def run() -> list[Tensor]:
        torch._foreach_copy_(into, views)
        return outs

    return run


def _take_flat(inputs: Inputs) -> Run:
    outs = [torch.zeros_like(row) for row in inputs.clients]
    places = [_places(inputs, k, labels=False) for k in range(len(outs))]

    def run() -> list[Tensor]:
        for out, (place, own) in zip(outs, places, strict=True):
            out.index_copy_(0, own, inputs.row[place])
        return outs

    return run


def _take_reference(inputs: Inputs) -> Tensor:
    layout = inputs.model.layout
    return torch.cat([reference.take(inputs.row, layout, own) for own in inputs.layouts])
