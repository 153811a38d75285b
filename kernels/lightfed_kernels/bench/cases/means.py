"""Means of rows: FedAvg's, FlexiFed's over groups of clients, and FedBCD's step of the server."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightfed_kernels.bench import official, rivals
from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS, Case, Contender, Run
from lightfed_kernels.bench.cases.common import (
    RIVAL_TOLERANCE,
    TOLERANCE,
    Source,
    nan_like,
    sample_counts,
    tensors,
    values,
)
from lightfed_kernels.bench.models import Model
from lightfed_kernels.groups import Groups, grouped_mean_
from lightfed_kernels.layout import Layout
from lightfed_kernels.means import server_step_, weighted_mean
from lightfed_kernels.reference import rows as reference

OPERATIONS = ("weighted_mean", "server_step", "grouped_mean")

LR = 0.5

# FlexiFed's groups share the first tensors of a model with all clients, the next with half of
# them, the last with a quarter.
PARTS = 3


@dataclass(frozen=True)
class Inputs:
    """The clients' rows and weights, and the server's row."""

    layout: Layout
    rows: Tensor
    weights: list[float]
    server: Tensor


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    layout = model.layout
    row_bytes = layout.size * dtype.itemsize

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        return Inputs(layout, source.rows(clients), sample_counts(clients), source.row())

    mean = Case(
        operation="weighted_mean",
        model=model.name,
        shape=f"{clients} client{'s' if clients > 1 else ''}",
        clients=clients,
        dtype=dtype,
        build=build,
        reference=lambda x: reference.weighted_mean(list(x.rows.cpu()), x.weights),
        contenders={
            OURS: Contender(_mean),
            OFFICIAL: Contender(_mean_official),
            "foreach": Contender(_mean_foreach),
            "flat": Contender(_mean_flat),
            "mv": Contender(_mean_mv),
            COMPILED: Contender(partial(_mean_flat, compiled=True)),
        },
        floor_bytes=(clients + 1) * row_bytes,
        input_bytes=(clients + 6) * row_bytes,
        tolerance=TOLERANCE[dtype],
        rival_tolerance=RIVAL_TOLERANCE[dtype],
    )
    server = replace(
        mean,
        operation="server_step",
        reference=lambda x: reference.server_step(
            x.server.cpu(), list(x.rows.cpu()), x.weights, lr=LR
        ),
        contenders={
            OURS: Contender(_server),
            OFFICIAL: Contender(_server_official),
            "foreach": Contender(_server_foreach),
            "flat": Contender(_server_flat),
            "addmv": Contender(_server_addmv),
            COMPILED: Contender(partial(_server_flat, compiled=True)),
        },
        floor_bytes=(clients + 2) * row_bytes,
    )
    grouped = replace(
        mean,
        operation="grouped_mean",
        reference=_grouped_reference,
        contenders={
            OURS: Contender(_grouped),
            OFFICIAL: Contender(_grouped_official),
            "foreach": Contender(_grouped_foreach),
            "flat": Contender(_grouped_flat),
        },
        floor_bytes=2 * clients * row_bytes,
        input_bytes=(5 * clients + 4) * row_bytes,
    )
    # The mean of one client is that client.
    return [mean, server, grouped] if clients > 1 else [mean, server]


def _mean(given: Inputs) -> Run:
    out = nan_like(given.server)
    return lambda: weighted_mean(given.rows, given.weights, out=out)


def _mean_official(given: Inputs) -> Run:
    models = tensors(given.layout, given.rows)
    return lambda: official.fedavg(models, given.weights)


def _mean_foreach(given: Inputs) -> Run:
    models = [values(named) for named in tensors(given.layout, given.rows)]
    return lambda: _named(given.layout, rivals.foreach_mean(models, given.weights))


def _mean_flat(given: Inputs, *, compiled: bool = False) -> Run:
    function = rivals.compiled(rivals.flat_mean) if compiled else rivals.flat_mean
    rows = list(given.rows)
    return lambda: function(rows, given.weights)


def _mean_mv(given: Inputs) -> Run:
    shares = _tensor(given) / sum(given.weights)
    return lambda: torch.mv(given.rows.t(), shares)


def _server(given: Inputs) -> Run:
    z = given.server.clone()
    return lambda: server_step_(z, given.rows, given.weights, lr=LR)


def _server_official(given: Inputs) -> Run:
    z = given.layout.views(given.server.clone())
    models = tensors(given.layout, given.rows)
    return lambda: official.fedbcd_server(z, models, given.weights, LR)


def _server_foreach(given: Inputs) -> Run:
    z = values(given.layout.views(given.server.clone()))
    models = [values(named) for named in tensors(given.layout, given.rows)]
    return lambda: _named(given.layout, rivals.foreach_server(z, models, given.weights, LR))


def _server_flat(given: Inputs, *, compiled: bool = False) -> Run:
    function = rivals.compiled(rivals.flat_server) if compiled else rivals.flat_server
    z, rows = given.server.clone(), list(given.rows)
    return lambda: function(z, rows, given.weights, LR)


def _server_addmv(given: Inputs) -> Run:
    z, gamma = given.server.clone(), _tensor(given)
    return lambda: rivals.addmv_server(z, given.rows, gamma, LR)


def _tensor(given: Inputs) -> Tensor:
    return torch.tensor(given.weights, dtype=given.rows.dtype, device=given.rows.device)


def _named(layout: Layout, parts: list[Tensor]) -> dict[str, Tensor]:
    return {entry.name: part for entry, part in zip(layout, parts, strict=True)}


@dataclass(frozen=True)
class Job:
    """Clients that share the tensors from `first` to `last`, columns from `start` to `stop`."""

    members: list[int]
    first: int
    last: int
    start: int
    stop: int


def _jobs(layout: Layout, clients: int) -> list[Job]:
    """Every part of the model, by ever smaller groups of clients."""
    jobs: list[Job] = []
    tensors_ = len(layout.entries)
    bounds = [tensors_ * part // PARTS for part in range(PARTS + 1)]
    for part in range(PARTS):
        first, last = bounds[part], bounds[part + 1]
        groups = min(2**part, clients)
        for group in range(groups):
            members = list(range(clients))[
                clients * group // groups : clients * (group + 1) // groups
            ]
            jobs.append(Job(members, first, last, layout.span(first), layout.span(last)))
    return jobs


def _grouped(given: Inputs) -> Run:
    rows = given.rows.clone()
    jobs = [(j.members, j.start, j.stop) for j in _jobs(given.layout, len(rows))]
    groups = Groups.build(jobs, [given.layout.size] * len(rows), device=rows.device)

    def run() -> Tensor:
        grouped_mean_(rows, groups)
        return rows

    return run


def _grouped_official(given: Inputs) -> Run:
    rows = given.rows.clone()
    models = tensors(given.layout, rows)
    names = [entry.name for entry in given.layout]
    jobs = [
        (job.members, name)
        for job in _jobs(given.layout, len(rows))
        for name in names[job.first : job.last]
    ]

    def run() -> Tensor:
        official.flexifed_average(models, jobs)
        return rows

    return run


def _grouped_foreach(given: Inputs) -> Run:
    rows = given.rows.clone()
    models = [values(named) for named in tensors(given.layout, rows)]
    jobs = [
        [models[k][job.first : job.last] for k in job.members]
        for job in _jobs(given.layout, len(rows))
    ]

    def run() -> Tensor:
        rivals.foreach_grouped(jobs)
        return rows

    return run


def _grouped_flat(given: Inputs) -> Run:
    rows = given.rows.clone()
    jobs = [
        (torch.tensor(job.members, device=rows.device), job.start, job.stop)
        for job in _jobs(given.layout, len(rows))
    ]
    return lambda: rivals.flat_grouped(rows, jobs)


def _grouped_reference(given: Inputs) -> Tensor:
    jobs = [(j.members, j.start, j.stop) for j in _jobs(given.layout, len(given.rows))]
    return torch.cat(reference.grouped_mean(list(given.rows.cpu()), jobs))
