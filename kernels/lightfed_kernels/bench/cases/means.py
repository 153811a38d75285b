"""Means of rows: FedAvg's and FlexiFed's over groups of clients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightfed_kernels.bench import official, rivals
from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS, Case, Run
from lightfed_kernels.bench.cases.common import Source, listed, named, plural, whole
from lightfed_kernels.bench.models import Model
from lightfed_kernels.groups import Groups, grouped_mean_
from lightfed_kernels.layout import Layout
from lightfed_kernels.means import weighted_mean
from lightfed_kernels.reference import rows as reference

OPERATIONS = ("weighted_mean", "grouped_mean")

# FlexiFed's groups share the first tensors of a model with all clients, the next with half of
# them, the last with a quarter.
PARTS = 3


@dataclass(frozen=True)
class Inputs:
    """The clients' rows and weights."""

    layout: Layout
    rows: Tensor
    weights: list[float]

    def shares(self) -> Tensor:
        """The weights in the dtype of the rows; their sum is 1."""
        weights = torch.tensor(self.weights, dtype=self.rows.dtype, device=self.rows.device)
        return weights / sum(self.weights)


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    layout = model.layout
    row_bytes = layout.size * dtype.itemsize

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        drawn = torch.randint(1, 100, (clients,), generator=torch.Generator().manual_seed(seed))
        weights = [float(weight) for weight in drawn]
        return Inputs(layout, source.rows(clients), weights)

    mean = Case(
        operation="weighted_mean",
        model=model.name,
        shape=plural(clients, "client"),
        dtype=dtype,
        build=build,
        reference=lambda x: reference.weighted_mean(list(x.rows.cpu()), x.weights),
        codes={
            OURS: _mean,
            OFFICIAL: partial(_mean_of, mean=official.fedavg, form=named),
            "foreach": partial(_mean_of, mean=rivals.foreach_mean, form=listed),
            "flat": partial(_mean_of, mean=rivals.flat_mean, form=whole),
            "mv": _mean_mv,
            COMPILED: lambda x: _mean_of(x, mean=rivals.compiled(rivals.flat_mean), form=whole),
        },
        floor_bytes=(clients + 1) * row_bytes,
        input_bytes=(clients + 6) * row_bytes,
    )
    grouped = replace(
        mean,
        operation="grouped_mean",
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
    # The mean of one client is that client.
    return [mean, grouped] if clients > 1 else [mean]


def _mean(given: Inputs) -> Run:
    out = torch.full_like(given.rows[0], torch.nan)
    return lambda: weighted_mean(given.rows, given.weights, out=out)


def _mean_of(given: Inputs, *, mean: Callable[..., Any], form: Callable[..., Any]) -> Run:
    models = form(given.layout, given.rows)
    return lambda: mean(models, given.weights)


def _mean_mv(given: Inputs) -> Run:
    shares = given.shares()
    return lambda: torch.mv(given.rows.t(), shares)


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
