"""Checks the arguments of a Federation and the flags of the Trainer.

Lightning rejects some wrong flags only later, and without naming them. Every check here raises a
UserError that names the key.
"""

import os
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightfed.api.algorithm import Algorithm
from lightfed.distributed.slurm import check_tasks
from lightfed.engine.strategy import FederatedStrategy
from lightfed.local.client_group import ClientGroup
from lightfed.runs.saving import LastCheckpoint
from lightfed.utils.errors import UserError

Clips = Literal["norm", "value", "network"]


def client_groups(groups: list[ClientGroup] | None, *, dealt: bool = False) -> list[ClientGroup]:
    """Return the client groups, after checking each of them.

    Args:
        groups: The groups, as configured.
        dealt: Whether clients are dealt to the groups later. A group may then be empty.

    Raises:
        UserError: There is no group or no client, or a group cannot be used.
    """
    if not groups:
        found = "no group" if groups is None else "an empty list"
        raise UserError("model.clients", found, "describe at least one: count, model")

    for position, group in enumerate(groups):
        group.check(position, least=0 if dealt else 1)
    if all(group.count == 0 for group in groups):
        raise UserError("model.clients", "no client in any group", "give a count")
    return groups


def algorithm(given: Algorithm) -> Algorithm:
    """Return the algorithm, after checking that its constructor has made it a module."""
    if "_modules" not in vars(given):
        found = f"{type(given).__name__} does not call super().__init__()"
        raise UserError("model.algorithm", found, "call it first in its __init__")
    return given


def check_least(key: str, value: int | None, least: int = 1) -> None:
    """Refuse a number that is too small; None stands for no number."""
    if value is not None and value < least:
        raise UserError(key, f"{value}", f"give at least {least}")


def check_rounds(*, max_epochs: int, max_steps: int, max_time: Any) -> None:
    """Refuse an invalid limit on the length of the run."""
    for flag, rounds in (("max_epochs", max_epochs), ("max_steps", max_steps)):
        if rounds is None or rounds < -1 or rounds == 0:
            fix = "give at least 1, or -1 for no limit"
            raise UserError(f"trainer.{flag}", f"{rounds} rounds", fix)

    try:
        seconds = Timer(max_time).time_remaining()
    except (MisconfigurationException, TypeError) as error:
        fix = "write days:hours:minutes:seconds, such as 00:12:00:00"
        raise UserError("trainer.max_time", f"{max_time!r}", fix) from error
    if seconds is not None and seconds <= 0:
        raise UserError("trainer.max_time", f"{max_time}", "give a time above 0, or null")


def last_checkpoint(every: int | None, *, enabled: bool) -> LastCheckpoint | None:
    """Return the callback that writes the default checkpoint; None if checkpoints are disabled.

    Args:
        every: The configured number of rounds between two checkpoints, if there is one.
        enabled: Whether the run keeps checkpoints.

    Raises:
        UserError: The interval is too short, or there are no checkpoints that it could be of.
    """
    check_least("trainer.checkpoint_every", every)
    if enabled:
        return LastCheckpoint(every)
    if every is not None:
        found = "trainer.enable_checkpointing is false"
        raise UserError("trainer.checkpoint_every", found, "enable checkpoints, or remove it")
    return None


def check_limit(flag: str, value: int | float | None, *, least: int) -> None:
    """Refuse an impossible limit on batches.

    Args:
        flag: The flag of the Trainer.
        value: A number of batches (int), or their share (float); None for all.
        least: The smallest number that is allowed.
    """
    if not isinstance(value, float):
        check_least(f"trainer.{flag}", value, least)
    elif not (0 < value <= 1 or value == least):
        fix = "give a float above 0 and at most 1, or a whole number of batches"
        raise UserError(f"trainer.{flag}", f"{value} is not a share", fix)


def check_clipping(value: float | None, algorithm: str) -> None:
    """Refuse negative limits on gradients, or NaN, and unknown ways of clipping."""
    if value is not None and not value >= 0:  # also refuses NaN
        fix = "give a limit above 0, or null"
        raise UserError("trainer.gradient_clip_val", f"{value}", fix)

    choices = get_args(Clips)
    if algorithm not in choices:
        fix = f"choose one of {', '.join(choices)}"
        raise UserError("trainer.gradient_clip_algorithm", repr(algorithm), fix)


def federated(strategy: FederatedStrategy | str) -> FederatedStrategy:
    """Return the strategy, which may be given by its name; no other can run a federation."""
    if isinstance(strategy, FederatedStrategy):
        return strategy
    if strategy != "federated":
        found = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise UserError("trainer.strategy", found, "use strategy: federated")
    return FederatedStrategy()


def check_devices(
    accelerator: str, devices: int | str | list[int], *, ranks_per_device: int = 1
) -> None:
    """Refuse devices that this machine lacks, and ranks that cannot share one.

    Args:
        accelerator: cpu, gpu, cuda or auto.
        devices: The devices of this node, or their number, as for Lightning's Trainer.
        ranks_per_device: The number of ranks on each GPU.
    """
    choices = ("auto", "cpu", "gpu", "cuda")
    if accelerator not in choices:
        fix = f"choose one of {', '.join(choices)}"
        raise UserError("trainer.accelerator", repr(accelerator), fix)

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    check_tasks(os.environ, accelerator=accelerator, gpus=gpus, ranks_per_device=ranks_per_device)
    if accelerator in ("gpu", "cuda") and not gpus:
        found = f"{accelerator!r}, but torch finds no CUDA device here"
        raise UserError("trainer.accelerator", found, "use accelerator: cpu")

    on_cpu = accelerator == "cpu" or not gpus
    if on_cpu and ranks_per_device > 1:
        fix = "give trainer.devices, the ranks here"
        raise UserError("trainer.ranks_per_device", f"{ranks_per_device} on the CPU", fix)
    if devices == "auto":
        return

    # The number of ranks on a CPU, or the numbers of GPUs.
    parsed: int | list[int] | None
    try:
        if on_cpu:
            parsed = CPUAccelerator.parse_devices(devices)  # type: ignore[arg-type]
        else:
            parsed = CUDAAccelerator.parse_devices(devices)
    except (MisconfigurationException, TypeError, ValueError) as error:
        found = " ".join(f"{devices!r}: {error}".split())
        fix = "give the number of ranks on this node; ranks share a GPU by trainer.ranks_per_device"
        raise UserError("trainer.devices", found, fix) from error
    if not parsed or (isinstance(parsed, list) and max(parsed) >= gpus):
        fix = f"give at least 1 and at most {gpus}"
        raise UserError("trainer.devices", f"{devices} on {gpus} GPUs", fix)
