"""Means over groups of clients (FlexiFed)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from lightfed_kernels.groups import Groups
from lightfed_kernels.layout import Layout
from lightfed_kernels.means import grouped_mean_
from lightfed_kernels.reference import rows as reference
from torch import Tensor

from bench import official, rivals
from bench.case import OFFICIAL, OURS, Case, Run
from bench.cases.common import Source, listed, named, plural
from bench.models import Model

OPERATIONS = ("grouped_mean",)

# FlexiFed's groups share the first tensors of a model with all clients, the next with half of
# them, the last with a quarter.
PARTS = 3


@dataclass(frozen=True)
class Inputs:
    """The clients' rows."""

    layout: Layout
    rows: Tensor


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Return the case of some clients; none for one client, which is its own mean."""
    if clients == 1:
        return []
    layout = model.layout
    row_bytes = layout.size * dtype.itemsize

    def build(seed: int) -> Inputs:
        return Inputs(layout, Source(layout, seed, dtype, device).rows(clients))

    grouped = Case(
        operation="grouped_mean",
        model=model.name,
        shape=plural(clients, "client"),
        dtype=dtype,
        build=build,
        reference=_reference,
        codes={
            OURS: _grouped,
            OFFICIAL: _grouped_official,
            "foreach": _grouped_foreach,
            "flat": _grouped_flat,
        },
        floor_bytes=2 * clients * row_bytes,
        input_bytes=(5 * clients + 4) * row_bytes,
    )
    return [grouped]


def _jobs(inputs: Inputs) -> list[tuple[list[int], int, int]]:
    """Return the jobs: members, the first tensor that they share, and the one behind the last.

    The further back a part of the model is, the smaller are the groups that share it.
    """
    clients = len(inputs.rows)
    tensors = len(inputs.layout.entries)
    jobs = []
    for part in range(PARTS):
        first = tensors * part // PARTS
        last = tensors * (part + 1) // PARTS
        groups = min(2**part, clients)
        for group in range(groups):
            members = range(clients * group // groups, clients * (group + 1) // groups)
            jobs.append((list(members), first, last))
    return jobs


def _columns(inputs: Inputs) -> list[tuple[list[int], int, int]]:
    """Return the jobs with columns of the rows instead of tensors."""
    span = inputs.layout.span
    return [(members, span(first), span(last)) for members, first, last in _jobs(inputs)]


def _grouped(inputs: Inputs) -> Run:
    rows = inputs.rows
    groups = Groups.build(_columns(inputs), [inputs.layout.size] * len(rows), device=rows.device)
    return _in_place(inputs, partial(grouped_mean_, rows, groups))


def _grouped_official(inputs: Inputs) -> Run:
    names = [entry.name for entry in inputs.layout]
    jobs: list[tuple[list[int], str]] = []
    for members, first, last in _jobs(inputs):
        jobs += [(members, name) for name in names[first:last]]
    models = named(inputs.layout, inputs.rows)
    return _in_place(inputs, partial(official.flexifed_average, models, jobs))


def _grouped_foreach(inputs: Inputs) -> Run:
    models = listed(inputs.layout, inputs.rows)
    jobs = []
    for members, first, last in _jobs(inputs):
        jobs.append([models[member][first:last] for member in members])
    return _in_place(inputs, partial(rivals.foreach_grouped, jobs))


def _grouped_flat(inputs: Inputs) -> Run:
    device = inputs.rows.device
    jobs = []
    for members, start, stop in _columns(inputs):
        jobs.append((torch.tensor(members, device=device), start, stop))
    return _in_place(inputs, partial(rivals.flat_grouped, inputs.rows, jobs))


def _in_place(inputs: Inputs, call: Callable[[], object]) -> Run:
    """Return a call that overwrites the rows, which are its result."""

    def run() -> Tensor:
        call()
        return inputs.rows

    return run


def _reference(inputs: Inputs) -> Tensor:
    rows = list(inputs.rows.cpu())
    return torch.cat(reference.grouped_mean(rows, _columns(inputs)))
