"""What the Trainer's flags may be; Lightning refuses some of them later, and does not name them."""

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightfed.engine.strategy import FederatedStrategy
from lightfed.utils.errors import UserError

_ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
Clips = Literal["norm", "value", "network"]


def check_rounds(*, max_epochs: int, max_steps: int, max_time: Any) -> None:
    """Refuse a length of the run that is none.

    Raises:
        UserError: naming the flag.
    """
    for key, value in (("max_epochs", max_epochs), ("max_steps", max_steps)):
        if value is None or value < -1 or value == 0:
            fix = "give at least 1, or -1 for no limit"
            raise UserError(f"trainer.{key}", f"{value} rounds", fix)
    try:
        seconds = Timer(max_time).time_remaining()
    except (MisconfigurationException, TypeError) as error:
        fix = "write days:hours:minutes:seconds, such as 00:12:00:00"
        raise UserError("trainer.max_time", f"{max_time}", fix) from error
    if seconds is not None and seconds <= 0:
        raise UserError("trainer.max_time", f"{max_time}", "give some time to train in, or null")


def check_at_least_one(flags: Mapping[str, int]) -> None:
    """Refuse counts of nothing.

    Raises:
        UserError: naming the flag.
    """
    for key, value in flags.items():
        if value < 1:
            raise UserError(f"trainer.{key}", f"{value}", "give at least 1")


def check_limit(key: str, value: int | float | None, *, least: int) -> None:
    """Refuse a number (int) or share (float) of batches that there cannot be.

    Args:
        key: of the flag.
        value: None for all batches.
        least: 0 where none at all makes sense.

    Raises:
        UserError: naming the flag.
    """
    if isinstance(value, float):
        if not (0 < value <= 1 or value == least):
            fix = "give a float above 0 and at most 1, or a whole number of batches"
            raise UserError(f"trainer.{key}", f"{value} is no share", fix)
    elif value is not None and value < least:
        raise UserError(f"trainer.{key}", f"{value} batches", f"give at least {least}")


def check_clipping(value: float | None, algorithm: str) -> None:
    """Refuse a limit on gradients that would reverse or void them, and a way to keep to none.

    Raises:
        UserError: naming the flag.
    """
    if value is not None and not value >= 0:
        raise UserError("trainer.gradient_clip_val", f"{value}", "give a limit above 0, or null")
    if algorithm not in get_args(Clips):
        fix = f"choose one of {', '.join(get_args(Clips))}"
        raise UserError("trainer.gradient_clip_algorithm", f"{algorithm!r}", fix)
    if algorithm != "norm" and not value:
        found = f"{algorithm}, where nothing is clipped"
        fix = "give trainer.gradient_clip_val, or leave it out"
        raise UserError("trainer.gradient_clip_algorithm", found, fix)


def check_strategy(strategy: Any) -> None:
    """Refuse what starts ranks that know nothing of each other's clients.

    Raises:
        UserError: naming the flag.
    """
    if strategy != "federated" and not isinstance(strategy, FederatedStrategy):
        found = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise UserError("trainer.strategy", found, "use strategy: federated")


def check_devices(
    accelerator: str, devices: int | str | list[int], *, ranks_per_device: int = 1
) -> None:
    """Refuse devices that this machine does not have, and ranks that would share one wrongly.

    Raises:
        UserError: naming the flag.
    """
    if accelerator not in _ACCELERATORS:
        fix = f"choose one of {', '.join(_ACCELERATORS)}"
        raise UserError("trainer.accelerator", f"{accelerator!r}", fix)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if accelerator in ("gpu", "cuda") and not there:
        found = f"{accelerator!r}, but torch finds no CUDA device here"
        raise UserError("trainer.accelerator", found, "use accelerator: cpu")
    on_cpu = accelerator == "cpu" or not there
    pattern = r"auto|[1-9]\d*" if on_cpu else r"auto|-1|\d+(,\d+)*,?"
    if isinstance(devices, str) and not re.fullmatch(pattern, devices.replace(" ", "")):
        raise UserError("trainer.devices", f"{devices!r}", "give the number of ranks on this node")
    if on_cpu and ranks_per_device > 1:
        found = f"{ranks_per_device} on the CPU"
        raise UserError("trainer.ranks_per_device", found, "give trainer.devices, the ranks here")
    named = re.findall(r"\d+", devices) if isinstance(devices, str) and "," in devices else devices
    if isinstance(named, list) and len(set(named)) < len(named) and not on_cpu:
        found = f"{devices} names a GPU twice, but NCCL refuses two ranks on a GPU"
        raise UserError("trainer.devices", found, "set trainer.ranks_per_device")
    if on_cpu and isinstance(devices, list):
        raise UserError("trainer.devices", f"{devices}", "give a number: CPU ranks have no index")
    if isinstance(devices, int) and (devices < 1 and (on_cpu or devices != -1)):
        raise UserError("trainer.devices", f"{devices} ranks", "give at least 1")
    if not on_cpu and isinstance(devices, int) and devices > there:
        found = f"{devices} ranks on {there} GPUs"
        raise UserError("trainer.devices", found, f"give at most {there}")
