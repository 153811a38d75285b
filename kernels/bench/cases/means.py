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
    """None for one client: its mean is that client."""
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
        reference=lambda x: torch.cat(reference.grouped_mean(list(x.rows.cpu()), _columns(x))),
        codes={
            OURS: _grouped,
            OFFICIAL: _grouped_official,
            "foreach": _grouped_foreach,
            "flat": _grouped_flat,
        },
        floor_bytes=2 * clients * row_bytes,
        input_bytes=(5 * clients + 4) * row_bytes,
    )
    return [grouped] if clients > 1 else []


def _jobs(given: Inputs) -> list[tuple[list[int], int, int]]:
    """Every part of the model, by ever smaller groups: members, first tensor, the one past it."""
    clients, tensors = len(given.rows), len(given.layout.entries)
    jobs = []
    for part in range(PARTS):
        groups = min(2**part, clients)
        for group in range(groups):
            members = range(clients * group // groups, clients * (group + 1) // groups)
            jobs.append((list(members), tensors * part // PARTS, tensors * (part + 1) // PARTS))
    return jobs


def _columns(given: Inputs) -> list[tuple[list[int], int, int]]:
    """The same with columns of the rows."""
    span = given.layout.span
    return [(members, span(first), span(last)) for members, first, last in _jobs(given)]


def _grouped(given: Inputs) -> Run:
    rows = given.rows
    groups = Groups.build(_columns(given), [given.layout.size] * len(rows), device=rows.device)
    return _in_place(given, partial(grouped_mean_, rows, groups))


def _grouped_official(given: Inputs) -> Run:
    names = [entry.name for entry in given.layout]
    jobs = [(own, name) for own, first, last in _jobs(given) for name in names[first:last]]
    models = named(given.layout, given.rows)
    return _in_place(given, partial(official.flexifed_average, models, jobs))


def _grouped_foreach(given: Inputs) -> Run:
    models = listed(given.layout, given.rows)
    jobs = [[models[k][first:last] for k in own] for own, first, last in _jobs(given)]
    return _in_place(given, partial(rivals.foreach_grouped, jobs))


def _grouped_flat(given: Inputs) -> Run:
    device = given.rows.device
    jobs = [(torch.tensor(own, device=device), a, b) for own, a, b in _columns(given)]
    return _in_place(given, partial(rivals.flat_grouped, given.rows, jobs))


def _in_place(given: Inputs, call: Callable[[], object]) -> Run:
    """A call that overwrites the rows."""

    def run() -> Tensor:
        call()
        return given.rows

    return run
