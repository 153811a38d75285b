"""slice_merge and slice_take: HeteroFL's aggregation and distribution over five widths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightfed_kernels.bench import official, rivals
from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS, Case, Contender, Run
from lightfed_kernels.bench.cases.common import RIVAL_TOLERANCE, TOLERANCE, Source
from lightfed_kernels.bench.models import CLASSES, RATES, Model
from lightfed_kernels.layout import Entry, Layout
from lightfed_kernels.members import Members
from lightfed_kernels.merge import slice_merge_, slice_take_
from lightfed_kernels.reference import slices as reference
from lightfed_kernels.slices import SliceTable

# torch.compile takes a graph of every client; more of them take minutes.
COMPILED_CLIENTS = 10


@dataclass(frozen=True)
class Inputs:
    """The global row, the clients' rows, their levels and the two labels each of them holds."""

    model: Model
    levels: list[Layout]
    table: SliceTable
    row: Tensor
    clients: list[Tensor]
    level: list[int]
    labels: list[list[int]]

    def layout(self, client: int) -> Layout:
        return self.levels[self.level[client]]


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    levels = [model.level(rate) for rate in RATES]
    level = [k % len(levels) for k in range(clients)]
    labels = [sorted({k % CLASSES, (k + 1) % CLASSES}) for k in range(clients)]
    table = SliceTable.build(model.layout, levels, label_rows=model.label_rows, device=device)
    covered = sum(levels[own].numel for own in level)

    def build(seed: int) -> Inputs:
        rows = [
            Source(levels[own], 1000 * seed + k, dtype, device).row() for k, own in enumerate(level)
        ]
        row = Source(model.layout, 1000 * seed + clients, dtype, device).row()
        return Inputs(model, levels, table, row, rows, level, labels)

    contenders = {
        OURS: Contender(_merge),
        OFFICIAL: Contender(_merge_official),
        "foreach": Contender(_merge_foreach),
        "flat": Contender(_merge_flat),
    }
    if clients <= COMPILED_CLIENTS:
        contenders[COMPILED] = Contender(partial(_merge_flat, compiled=True))
    merge = Case(
        operation="slice_merge",
        model=model.name,
        shape=f"{clients} client{'s' if clients > 1 else ''}",
        clients=clients,
        dtype=dtype,
        build=build,
        reference=_merge_reference,
        contenders=contenders,
        floor_bytes=_merged(model, levels, level, labels) * dtype.itemsize,
        input_bytes=8 * (covered + 2 * model.layout.numel) * dtype.itemsize,
        tolerance=TOLERANCE[dtype],
        rival_tolerance=RIVAL_TOLERANCE[dtype],
    )
    take = replace(
        merge,
        operation="slice_take",
        reference=_take_reference,
        contenders={
            OURS: Contender(_take),
            OFFICIAL: Contender(_take_official),
            "foreach": Contender(_take_foreach),
            "flat": Contender(_take_flat),
        },
        # Client 0 is of the full width, so that the whole row is read.
        floor_bytes=(covered + model.layout.numel) * dtype.itemsize,
        tolerance=0.0,
        rival_tolerance=0.0,
    )
    return [merge, take]


def _merged(
    model: Model, levels: Sequence[Layout], level: Sequence[int], labels: Sequence[Sequence[int]]
) -> int:
    """Elements that a merge reads or writes: of tensors whose rows are labels, only those held."""

    def held(layout: Layout, share: float) -> float:
        return sum(e.numel * (share if e.name in model.label_rows else 1) for e in layout)

    read = sum(
        held(levels[own], len(mine) / CLASSES) for own, mine in zip(level, labels, strict=True)
    )
    written = held(model.layout, len({label for mine in labels for label in mine}) / CLASSES)
    return round(read + written)


def _merge(given: Inputs) -> Run:
    members = Members.build(given.table, given.level, labels=given.labels)
    row = given.row.clone()
    return lambda: slice_merge_(row, given.clients, members)


def _merge_official(given: Inputs) -> Run:
    model = given.model.layout.views(given.row.clone())
    locals_ = [given.layout(k).views(row) for k, row in enumerate(given.clients)]
    indices = [_indices(given, k) for k in range(len(given.clients))]
    labels = [torch.tensor(own, device=given.row.device) for own in given.labels]
    return lambda: official.heterofl_combine(
        model, locals_, indices, labels, given.model.label_rows
    )


def _indices(given: Inputs, client: int) -> official.Indices:
    shapes = {entry.name: entry.shape for entry in given.layout(client)}
    return official.heterofl_split(shapes, given.row.device)


def _merge_foreach(given: Inputs) -> Run:
    layout = given.model.layout
    row, total, count = given.row.clone(), *(torch.zeros_like(given.row) for _ in range(2))
    clients, labelled = [], []
    for k, own in enumerate(given.clients):
        pairs = list(zip(layout, given.layout(k), strict=True))
        whole = [pair for pair in pairs if pair[0].name not in given.model.label_rows]
        clients.append(
            (
                [_narrow(layout.view(total, wide), narrow) for wide, narrow in whole],
                [_narrow(layout.view(count, wide), narrow) for wide, narrow in whole],
                [given.layout(k).view(own, narrow) for _, narrow in whole],
            )
        )
        for wide, narrow in pairs:
            if wide.name in given.model.label_rows:
                labels = torch.tensor(given.labels[k], device=row.device)
                into, number = (layout.view(x, wide).view(CLASSES, -1) for x in (total, count))
                local = given.layout(k).view(own, narrow).view(CLASSES, -1)
                labelled.append((into, number, labels, local))
    parts, totals, counts = ([*layout.views(x).values()] for x in (row, total, count))
    names = [entry.name for entry in layout]
    return lambda: dict(
        zip(names, rivals.foreach_merge(parts, totals, counts, clients, labelled), strict=True)
    )


def _narrow(view: Tensor, entry: Entry) -> Tensor:
    for dim, size in enumerate(entry.shape):
        view = view.narrow(dim, 0, size)
    return view


def _merge_flat(given: Inputs, *, compiled: bool = False) -> Run:
    row = given.row.clone()
    function = rivals.compiled(rivals.flat_merge) if compiled else rivals.flat_merge
    pairs = [_places(given, k, labels=True) for k in range(len(given.clients))]
    places, own = [place for place, _ in pairs], [mine for _, mine in pairs]
    return lambda: function(row, given.clients, places, own)


def _places(given: Inputs, client: int, *, labels: bool) -> tuple[Tensor, Tensor]:
    """Where the elements of a client's row belong in the global row, and which they are."""
    layout, narrow = given.model.layout, given.layout(client)
    every, mine = (torch.arange(x.size, device=given.row.device) for x in (layout, narrow))
    places, own = [], []
    for wide, entry in zip(layout, narrow, strict=True):
        place, self_ = _narrow(layout.view(every, wide), entry), narrow.view(mine, entry)
        if labels and wide.name in given.model.label_rows:
            place, self_ = place[given.labels[client]], self_[given.labels[client]]
        places.append(place.reshape(-1))
        own.append(self_.reshape(-1))
    return torch.cat(places), torch.cat(own)


def _merge_reference(given: Inputs) -> Tensor:
    layouts = [given.layout(k) for k in range(len(given.clients))]
    return reference.merge(
        given.row, given.model.layout, given.clients, layouts,
        labels=given.labels, label_rows=given.model.label_rows,
    )  # fmt: skip


def _take(given: Inputs) -> Run:
    outs = [torch.zeros_like(row) for row in given.clients]

    def run() -> list[Tensor]:
        slice_take_(given.row, outs, given.table, given.level)
        return outs

    return run


def _take_official(given: Inputs) -> Run:
    model = given.model.layout.views(given.row)
    indices = [_indices(given, k) for k in range(len(given.clients))]
    return lambda: official.heterofl_distribute(model, indices)


def _take_foreach(given: Inputs) -> Run:
    layout = given.model.layout
    outs = [torch.zeros_like(row) for row in given.clients]
    into, views = [], []
    for k, out in enumerate(outs):
        for wide, narrow in zip(layout, given.layout(k), strict=True):
            into.append(given.layout(k).view(out, narrow))
            views.append(_narrow(layout.view(given.row, wide), narrow))

    def run() -> list[Tensor]:
        torch._foreach_copy_(into, views)
        return outs

    return run


def _take_flat(given: Inputs) -> Run:
    outs = [torch.zeros_like(row) for row in given.clients]
    pairs = [_places(given, k, labels=False) for k in range(len(outs))]
    return lambda: [
        out.index_copy_(0, mine, given.row[place])
        for out, (place, mine) in zip(outs, pairs, strict=True)
    ]


def _take_reference(given: Inputs) -> Tensor:
    target = given.model.layout
    return torch.cat(
        [reference.take(given.row, target, given.layout(k)) for k in range(len(given.clients))]
    )
