"""The network and the recorded runs of golden/fedbcd: 12 devices of 3 servers."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

from lightfed.algorithms.fedbcd.hierarchy import Phase
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from tests.algorithms.peers.dispfl_cases import in_order, row_of
from tests.small import GOLDEN, data_of, fleet_of

DEVICES, SERVERS = 12, 3
RUNS = json.loads((GOLDEN / "fedbcd/runs.json").read_text())
Events = Iterator[list[Any]]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 4))


def federation(
    algorithm: Algorithm, name: str, *, vectors_of: str | None = None
) -> tuple[Fleet, dict[str, Tensor]]:
    """The recorded devices with their data, all at the recorded initial weights.

    Args:
        algorithm: of the federation.
        name: of the recorded run.
        vectors_of: the run whose tensors these are; that one by default.
    """
    vectors, about = load_file(GOLDEN / f"fedbcd/{vectors_of or name}.safetensors"), RUNS[name]
    x = torch.cat([vectors[f"data/{k}/x"] for k in range(DEVICES)])
    y = torch.cat([vectors[f"data/{k}/y"] for k in range(DEVICES)])
    each = len(y) // DEVICES
    parts = [range(k * each, (k + 1) * each) for k in range(DEVICES)]
    data = in_order(data_of(x, y, parts, classes=4, batch_size=8))
    optimizer = partial(SGD, lr=about["lr"], momentum=about["momentum"], weight_decay=about["wd"])
    fleet = fleet_of([ClientGroup(DEVICES, network)], algorithm, data, optimizer=optimizer)
    start = row_of(vectors, "init", fleet.groups[0].layout)
    for model in algorithm.buffers():
        if model.shape == start.shape:
            model.copy_(start)
    if algorithm.stateful:
        for device in range(DEVICES):
            fleet.row(device).floats.copy_(start)
    return fleet, vectors


def events(name: str, t: int) -> Events:
    return iter(RUNS[name]["log"][t]["events"])


def recorded_phase(stated: Events, server: int, *, offline: bool) -> Phase:
    """A server's phase as it was drawn: who wakes up when, K and the time of a step in turn."""
    first = server * DEVICES // SERVERS
    awake = next(stated)[1]
    parts = [next(stated) for _ in range(2 if offline else 1)]
    chosen = [[first + place for place in part[3][: part[2]]] for part in parts]
    available, active = sorted(chosen[0]), sorted(chosen[-1])
    units, ends = {}, {}
    for device in available:
        units[device] = next(stated)[1]
        if device in active:
            ends[device] = awake[device - first] + units[device] * next(stated)[1]
    return Phase(active, available, units, ends)
