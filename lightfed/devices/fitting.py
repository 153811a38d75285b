"""Models fitted to devices: each client gets the largest that it can train in time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch

from lightfed.api.algorithm import Algorithm
from lightfed.data.datamodule import FederatedDataModule
from lightfed.devices.devices import Devices, seconds
from lightfed.local.client_group import ClientGroup, group_names
from lightfed.local.group_state import GroupState
from lightfed.local.local_work import LocalWork
from lightfed.local.memory import client_bytes
from lightfed.state.frozen_base import FrozenBase
from lightfed.utils.errors import UserError

KEY = "model.assign"


@dataclass(frozen=True)
class FastestFit:
    """Each client gets the first of the models whose session its device can do.

    A session has the mean number of samples: the model is received, trained and sent. The groups
    are in order, the largest model first. Their counts only add up to the number of clients.
    Clients are numbered group by group; within a group in the order of the devices.

    Attributes:
        deadline: Virtual seconds that a session may take; None for no limit.
        memory: Whether what a session holds must fit into the memory of the device.
    """

    deadline: float | None = None
    memory: bool = False

    def check(self, devices: Devices | None) -> None:
        """Refuse a rule without effect.

        Raises:
            UserError: There is no limit, no time, or there are no devices.
        """
        if self.deadline is None and not self.memory:
            raise UserError(KEY, "no limit", "give a deadline, or memory: true")
        if self.deadline is not None and not self.deadline > 0:
            raise UserError(f"{KEY}.deadline", str(self.deadline), "give seconds above 0")
        if devices is None:
            raise UserError(KEY, "given, but there are no devices", "give model.devices")

    def choose(
        self,
        values: dict[str, np.ndarray],
        work: np.ndarray,
        memory: np.ndarray,
        names: Sequence[str],
    ) -> list[int]:
        """Return the position of each client's model.

        Args:
            values: What the devices do in a second and their memory, (N,) each, by name.
            work: Bytes up, bytes down and FLOPs of a session with each of the models, (M, 3).
            memory: Bytes that such a session holds, (M,).
            names: Of the models, the largest first.

        Raises:
            UserError: A device can train none of the models.
        """
        session_seconds = np.stack([seconds(values, of_model[None]) for of_model in work])  # (M, N)
        fits = session_seconds <= (np.inf if self.deadline is None else self.deadline)
        if self.memory:
            fits &= memory[:, None] <= values["memory"]

        has_no_model = ~fits.any(axis=0)
        if has_no_model.any():
            limit = "memory" if self.deadline is None else "deadline"
            longest = f"{session_seconds[-1].max():.4g} virtual seconds"
            raise UserError(
                f"{KEY}.{limit}",
                f"{has_no_model.sum()} clients cannot train any model; {names[-1]} needs up to "
                f"{longest} "
                f"and {memory[-1]:.4g} bytes",
                "raise the limit, or add a smaller model at the end",
            )

        chosen: list[int] = fits.argmax(axis=0).tolist()
        return chosen


@dataclass(frozen=True)
class Fitted:
    """Clients that have been given the models which their devices can train.

    Attributes:
        groups: The groups with their clients, without empty ones.
        devices: The devices, in the order of the clients.
        algorithm: The algorithm, with the parts that fit if clients hold parts of one model.
    """

    groups: list[ClientGroup]
    devices: Devices
    algorithm: Algorithm


def fitted(
    rule: FastestFit,
    groups: Sequence[ClientGroup],
    algorithm: Algorithm,
    devices: Devices,
    data: FederatedDataModule,
    work: LocalWork,
    *,
    seed: int,
    parts: Sequence[float] = (),
    trainer: L.Trainer | None = None,
) -> Fitted:
    """Give each client the model that its device can train.

    Args:
        rule: Which model that is.
        groups: A model each, the largest first. Their counts add up to the number of clients.
        algorithm: Prepares the models.
        devices: The devices of the clients.
        data: The samples of the clients.
        work: The length of sessions.
        seed: Seed of the run.
        parts: The shares of one model that clients may hold, if the algorithm deals shares: then
            these are dealt, and the groups do not change.
        trainer: What a step of a model may ask for as `self.trainer` while its cost is measured.

    Raises:
        UserError: A group has a device of its own, or a device can train none of the models.
    """
    if devices.groups:
        raise UserError(
            KEY,
            f"given, and group {list(devices.groups)[:1]} has a device",
            "give one for all clients, or a table",
        )

    clients = sum(group.count for group in groups)
    values = devices.of({"all": clients}, seed=seed)
    samples = sum(work.samples(data, client, None) for client in range(clients)) / clients
    names = group_names(groups)
    needed_work, needed_memory = _needs(
        groups, names, algorithm, data, samples, seed=seed, trainer=trainer
    )

    if parts:
        # A part needs its share of what the whole model needs.
        largest_first = sorted(set(parts), reverse=True)
        names = [f"a density of {part:g}" for part in largest_first]
        work_of_parts = np.outer(largest_first, needed_work[0])
        memory_of_parts = np.multiply(largest_first, needed_memory[0])
        chosen = rule.choose(values, work_of_parts, memory_of_parts, names)
        part_of_each_client = [largest_first[position] for position in chosen]
        nonempty = [group for group in groups if group.count]
        return Fitted(nonempty, devices, algorithm.with_parts(part_of_each_client))

    chosen = rule.choose(values, np.array(needed_work), np.array(needed_memory), names)
    counts = np.bincount(chosen, minlength=len(groups))
    nonempty = []
    for group, count in zip(groups, counts, strict=True):
        if count:
            nonempty.append(replace(group, count=int(count)))

    # A stable sort: within a group, clients are in the order of the devices.
    order = np.argsort(chosen, kind="stable")
    ordered: dict[str, Any] = {name: of_clients[order] for name, of_clients in values.items()}
    return Fitted(nonempty, replace(devices, table=None, **ordered), algorithm)


def _needs(
    groups: Sequence[ClientGroup],
    names: Sequence[str],
    algorithm: Algorithm,
    data: FederatedDataModule,
    samples: float,
    *,
    seed: int,
    trainer: L.Trainer | None,
) -> tuple[list[list[float]], list[float]]:
    """Return what a session with each group's model needs.

    Args:
        groups: Each has a model.
        names: Of the groups.
        algorithm: Prepares the models.
        data: Has the shape of a sample.
        samples: Mean number of samples of a session.
        seed: Of the run.
        trainer: As of `fitted`.

    Returns:
        Bytes up, bytes down and FLOPs for each group; and the bytes that a session holds.
    """
    work = []
    memory: list[float] = []
    for position, (group, name) in enumerate(zip(groups, names, strict=True)):
        state = GroupState(
            group,
            data,
            base=FrozenBase(),
            name=name,
            position=position,
            seed=seed,
            device=torch.device("cpu"),
            host_rows=False,
            prepare=algorithm.prepare_module,
            trainer=trainer,
        )
        size = 4 * state.layout.floats.numel + 8 * state.layout.integers.numel
        work.append([size, size, state.passes * state.flops * samples])
        memory.append(client_bytes(state.module, state, data))
    return work, memory
