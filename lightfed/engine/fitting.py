"""Deals clients to groups by what their devices can train, before the federation is built."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup, GroupState, group_names
from lightfed.local.hooks import Hooks
from lightfed.local.local_work import LocalWork
from lightfed.local.packing import client_bytes
from lightfed.simulation.devices import Devices
from lightfed.simulation.fastest_fit import KEY, FastestFit, in_order
from lightfed.state.frozen_base import FrozenBase
from lightfed.utils.errors import require


def fitted(
    rule: FastestFit,
    groups: Sequence[ClientGroup],
    algorithm: Hooks,
    devices: Devices,
    data: FederatedDataModule,
    work: LocalWork,
    *,
    seed: int,
) -> tuple[list[ClientGroup], Devices]:
    """The groups with the clients that fit, without empty ones, and the devices in their order.

    If clients hold parts of one model, the algorithm gets those that fit, and nothing else changes.
    """
    own = [name for name, group in zip(group_names(groups), groups, strict=True) if group.device]
    require(not own, KEY, f"given, and group {own[:1]} has a device", "name it in model.devices")
    states = [
        GroupState(
            group, data, base=FrozenBase(), name=name, position=position, seed=seed,
            device=torch.device("cpu"), host_rows=False, prepare=algorithm.prepare_module,
        )
        for position, (group, name) in enumerate(zip(groups, group_names(groups), strict=True))
    ]  # fmt: skip
    clients = sum(group.count for group in groups)
    values = devices.of([(clients, None)], seed=seed)
    needed = np.stack([session_work(state, data, work, clients) for state in states])
    memory = [client_bytes(state.module, state, data) for state in states]
    if algorithm.parts:
        parts = sorted({*algorithm.parts}, reverse=True)
        needed, memory = np.outer(parts, needed[0]), [part * memory[0] for part in parts]
        chosen = rule.choose(values, needed, memory, [f"density {part:g}" for part in parts])
        algorithm.parts = [parts[place] for place in chosen.tolist()]
        return [*groups], devices
    chosen = rule.choose(values, needed, memory, [state.name for state in states])
    counts = np.bincount(chosen, minlength=len(groups)).tolist()
    dealt = [replace(g, count=n) for g, n in zip(groups, counts, strict=True) if n]
    return dealt, in_order(devices, values, chosen)


def session_work(
    state: GroupState, data: FederatedDataModule, work: LocalWork, clients: int
) -> np.ndarray:
    """(3,) bytes up, bytes down and FLOPs of a session with the mean number of samples."""
    size = 4 * state.layout.floats.numel + 8 * state.layout.integers.numel
    samples = sum(work.samples(data, k, None) for k in range(clients)) / clients
    return np.array([size, size, state.passes * state.flops * samples])
