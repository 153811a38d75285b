"""What a result depends on besides its configuration, as recorded in environment.json."""

import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightfed.api.fleet import Fleet
from lightfed.data.digests import digests
from lightfed.local.hooks import Hooks
from lightfed.utils import __version__
from lightfed.utils.code_files import code_of_users
from lightfed.utils.keys import experiment, flat
from lightfed.utils.record import commit

_PACKAGES = (
    "torch",
    "torchvision",
    "torchaudio",
    "lightning",
    "torchmetrics",
    "triton",
    "numpy",
)


def environment(fleet: Fleet, trainer: Any, *, evaluation: Any) -> dict[str, Any]:
    """Return the record of a run: software, the device, and the federation's size and data.

    Args:
        fleet: The federation.
        trainer: The trainer of the run.
        evaluation: The evaluation of the run.
    """
    data = trainer.datamodule
    digest_of_data = digests(trainer.config["data"], data.contents)

    # Runs are repetitions of one experiment only if they have the same data.
    values = dict(flat(trainer.config))
    for name, digest in digest_of_data.items():
        values[f"data.{name}.digest"] = digest

    device_name = "CPU"
    if fleet.device.type == "cuda":
        device_name = torch.cuda.get_device_name(fleet.device)

    run = {
        "algorithm": type(fleet.algorithm).__name__,
        "dataset": data.dataset.name,
        "synthetic": data.dataset.synthetic,
        "digests": digest_of_data,
        "experiment": experiment(values),
        "clients": fleet.clients,
        "groups": {state.name: state.group.count for state in fleet.groups},
        "parts": list(fleet.algorithm.parts),
        "parameters": {state.name: state.layout.parameter_numel for state in fleet.groups},
        "frozen_bytes": fleet.base.bytes,
        "rounds": trainer.max_epochs,
        "seed": fleet.seed,
        "ranks": fleet.ranks.world,
        "device": device_name,
        "precision": str(trainer.precision),
        "personal": _tested_by_clients(fleet),
        "evaluate_at": evaluation.at,
        "evaluated_clients": len(evaluation.clients),
        "side_by_side": fleet.training.side_by_side,
        "code": code_of_users(),
    }
    if fleet.unseen:
        run["unseen"] = list(fleet.unseen)
    return software() | run | fleet.algorithm.environment(fleet)


def _tested_by_clients(fleet: Fleet) -> str:
    """Return in words which model a client tests; empty if only the algorithm knows."""
    algorithm = fleet.algorithm
    tested = algorithm.holds
    chooses_models = type(algorithm).models is not Hooks.models
    if not tested and not chooses_models:
        tested = "the model that it keeps" if algorithm.stateful else "the server's model"

    if fleet.personal:
        tested += ", with tensors of its own"
    return tested


def software() -> dict[str, str]:
    """Return the versions of packages, the commit and the command, by name."""
    return _versions() | {"command": " ".join(sys.argv)}


@cache
def _versions() -> dict[str, str]:
    """Return the versions of packages and the commit, which stay while a process runs."""
    versions = {"python": platform.python_version(), "lightfed": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            # Some, such as Triton, are not on every system.
            continue
    versions["commit"] = commit()
    return versions
