"""Checks of arguments: those of a Federation, and the Trainer's flags.

Lightning rejects some flags only later, without naming them. Every check raises a UserError that
names the key.
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
from lightfed.utils.errors import UserError, require

Clips = Literal["norm", "value", "network"]


def client_groups(groups: list[ClientGroup] | None, *, dealt: bool = False) -> list[ClientGroup]:
    """The client groups, each checked; a group may be empty if clients are `dealt` to them."""
    if not groups:
        found = "no group" if groups is None else "an empty list"
        raise UserError("model.clients", found, "describe at least one: count, model")
    for position, group in enumerate(groups):
        group.check(position, least=0 if dealt else 1)
    none = not any(group.count for group in groups)
    require(not none, "model.clients", "no client in any group", "give a count")
    return groups


def algorithm(given: Algorithm) -> Algorithm:
    """The algorithm itself, if its constructor has made it a module."""
    found = f"{type(given).__name__} does not call super().__init__()"
    fix = "call it first in its __init__"
    require("_modules" in vars(given), "model.algorithm", found, fix)
    return given


def check_least(key: str, value: int | None, least: int = 1) -> None:
    """Reject a number that is too small; None is none."""
    require(value is None or value >= least, key, value, f"give at least {least}")


def _refuse(bad: bool, flag: str, found: object, fix: str) -> None:
    if bad:
        raise UserError(f"trainer.{flag}", f"{found}", fix)


def check_rounds(*, max_epochs: int, max_steps: int, max_time: Any) -> None:
    """Reject an invalid length of the run."""
    for flag, value in (("max_epochs", max_epochs), ("max_steps", max_steps)):
        none = value is None or value < -1 or value == 0
        _refuse(none, flag, f"{value} rounds", "give at least 1, or -1 for no limit")
    try:
        seconds = Timer(max_time).time_remaining()
    except (MisconfigurationException, TypeError) as error:
        fix = "write days:hours:minutes:seconds, such as 00:12:00:00"
        raise UserError("trainer.max_time", f"{max_time!r}", fix) from error
    no_time = seconds is not None and seconds <= 0
    _refuse(no_time, "max_time", max_time, "give a time above 0, or null")


def last_checkpoint(every: int | None, *, enabled: bool) -> LastCheckpoint | None:
    """The default checkpoint of a run, None without; impossible intervals are rejected."""
    check_least("trainer.checkpoint_every", every)
    unused, fix = every is not None and not enabled, "enable checkpoints, or remove it"
    _refuse(unused, "checkpoint_every", "trainer.enable_checkpointing is false", fix)
    return LastCheckpoint(every) if enabled else None


def check_limit(flag: str, value: int | float | None, *, least: int) -> None:
    """Reject an impossible number (int) or share (float) of batches; None is all."""
    if isinstance(value, float):
        fix = "give a float above 0 and at most 1, or a whole number of batches"
        _refuse(not (0 < value <= 1 or value == least), flag, f"{value} is not a share", fix)
    else:
        check_least(f"trainer.{flag}", value, least)


def check_clipping(value: float | None, algorithm: str) -> None:
    """Reject negative or nan limits on gradients, and unknown ways of clipping."""
    negative = value is not None and not value >= 0  # or nan
    _refuse(negative, "gradient_clip_val", value, "give a limit above 0, or null")
    choices, flag = get_args(Clips), "gradient_clip_algorithm"
    _refuse(algorithm not in choices, flag, repr(algorithm), f"choose one of {', '.join(choices)}")


def federated(strategy: FederatedStrategy | str) -> FederatedStrategy:
    """The strategy itself, also by its name; no other can run a federation."""
    if isinstance(strategy, FederatedStrategy):
        return strategy
    found = strategy if isinstance(strategy, str) else type(strategy).__name__
    _refuse(strategy != "federated", "strategy", found, "use strategy: federated")
    return FederatedStrategy()


def check_devices(
    accelerator: str, devices: int | str | list[int], *, ranks_per_device: int = 1
) -> None:
    """Reject devices that this machine lacks, and ranks that would share one wrongly."""
    choices = ("auto", "cpu", "gpu", "cuda")
    fix = f"choose one of {', '.join(choices)}"
    _refuse(accelerator not in choices, "accelerator", repr(accelerator), fix)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    check_tasks(os.environ, accelerator=accelerator, gpus=there, ranks_per_device=ranks_per_device)
    missing = accelerator in ("gpu", "cuda") and not there
    found = f"{accelerator!r}, but torch finds no CUDA device here"
    _refuse(missing, "accelerator", found, "use accelerator: cpu")
    on_cpu = accelerator == "cpu" or not there
    shared, fix = on_cpu and ranks_per_device > 1, "give trainer.devices, the ranks here"
    _refuse(shared, "ranks_per_device", f"{ranks_per_device} on the CPU", fix)
    if devices == "auto":
        return
    try:
        named = (CPUAccelerator if on_cpu else CUDAAccelerator).parse_devices(devices)  # type: ignore[arg-type]
    except (MisconfigurationException, TypeError, ValueError) as error:
        fix = "give the number of ranks on this node; ranks share a GPU by trainer.ranks_per_device"
        found = " ".join(f"{devices!r}: {error}".split())
        raise UserError("trainer.devices", found, fix) from error
    few = not named or (isinstance(named, list) and max(named) >= there)
    _refuse(few, "devices", f"{devices} on {there} GPUs", f"give at least 1 and at most {there}")
