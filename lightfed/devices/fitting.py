"""Models fitted to devices: the largest that a client can train in time, or in its memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lightfed.data.datamodule import FederatedDataModule
from lightfed.devices.devices import Devices, seconds
from lightfed.local.client_group import ClientGroup, GroupState, group_names
from lightfed.local.hooks import Hooks
from lightfed.local.local_work import LocalWork
from lightfed.packs.packing import client_bytes
from lightfed.state.frozen_base import FrozenBase
from lightfed.utils.errors import require

KEY = "model.assign"


@dataclass(frozen=True)
class FastestFit:
    """Each client gets the first of the models whose session its device can do.

    A session is that of the mean number of samples: the model comes, is trained and goes. The
    groups are in order, the largest model first. Their counts only add up to the number of clients,
    which are numbered group by group; within a group in the order of the devices.

    Attributes:
        deadline: Virtual seconds that a session may take.
        memory: What a session holds must fit into the memory of the device.
    """

    deadline: float | None = None
    memory: bool = False

    def check(self, devices: Devices | None) -> None:
        """Reject a rule without effect."""
        limit, fix = self.deadline, "give a deadline, or memory: true"
        require(limit is not None or self.memory, KEY, "no limit", fix)
        require(limit is None or limit > 0, f"{KEY}.deadline", limit, "give seconds above 0")
        found, fix = "given, and no devices to fit to", "give model.devices"
        require(devices is not None, KEY, found, fix)

    def choose(
        self,
        values: dict[str, np.ndarray],
        work: np.ndarray,
        memory: np.ndarray,
        names: Sequence[str],
    ) -> list[int]:
        """The number of each client's model; a UserError if a device can train none of them.

        `values` are (N,) each, of the devices. A session with each of the models `names` takes
        `work`, (M, 3) bytes up, bytes down and FLOPs, and holds `memory`, (M,) bytes.
        """
        took = np.stack([seconds(values, each[None]) for each in work])
        fits = took <= (np.inf if self.deadline is None else self.deadline)
        if self.memory:
            fits &= memory[:, None] <= values["memory"]
        lacking, limit = ~fits.any(axis=0), "memory" if self.deadline is None else "deadline"
        needs = f"{took[-1].max():.4g} virtual seconds and {memory[-1]:.4g} bytes"
        found = f"{lacking.sum()} clients can train none; {names[-1]} needs up to {needs}"
        require(not lacking.any(), f"{KEY}.{limit}", found, "give more, or a smaller last model")
        chosen: list[int] = fits.argmax(axis=0).tolist()
        return chosen


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
    clients = sum(group.count for group in groups)
    values = devices.of([(clients, None)], seed=seed)
    samples = sum(work.samples(data, k, None) for k in range(clients)) / clients
    needed, memory, names = [], [], group_names(groups)
    for position, (group, name) in enumerate(zip(groups, names, strict=True)):
        state = GroupState(
            group, data, base=FrozenBase(), name=name, position=position, seed=seed,
            device=torch.device("cpu"), host_rows=False, prepare=algorithm.prepare_module,
        )  # fmt: skip
        size = 4 * state.layout.floats.numel + 8 * state.layout.integers.numel
        needed.append([size, size, state.passes * state.flops * samples])
        memory.append(client_bytes(state.module, state, data))
    if algorithm.parts:
        parts = sorted({*algorithm.parts}, reverse=True)
        names = [f"a density of {part:g}" for part in parts]
        given = np.outer(parts, needed[0]), np.multiply(parts, memory[0])
        algorithm.parts = [parts[place] for place in rule.choose(values, *given, names)]
        return [*groups], devices
    chosen = rule.choose(values, np.array(needed), np.array(memory), names)
    counts, order = np.bincount(chosen, minlength=len(groups)), np.argsort(chosen, kind="stable")
    dealt = [replace(g, count=int(n)) for g, n in zip(groups, counts, strict=True) if n]
    ordered: dict[str, Any] = {name: each[order] for name, each in values.items()}
    return dealt, replace(devices, table=None, **ordered)
