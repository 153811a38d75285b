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
from lightfed.utils.keys import experiment, flat
from lightfed.utils.record import commit

_PACKAGES = "torch torchvision torchaudio lightning torchmetrics triton numpy"


def environment(fleet: Fleet, trainer: Any, *, evaluation: Any) -> dict[str, Any]:
    """Versions, the device, and the federation's size and data; `evaluation` is that of the run."""
    data = trainer.datamodule
    device = fleet.device
    drawn = digests(trainer.config["data"], data.contents)
    named = {f"data.{name}.digest": text for name, text in drawn.items()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return (
        software()
        | {
            "algorithm": type(fleet.algorithm).__name__,
            "dataset": data.dataset.name,
            "synthetic": data.dataset.synthetic,
            "digests": drawn,
            "experiment": experiment(dict(flat(trainer.config)) | named),
            "clients": fleet.clients,
            "groups": {s.name: s.group.count for s in fleet.groups},
            "parts": [*fleet.algorithm.parts],
            "parameters": {s.name: s.layout.parameter_numel for s in fleet.groups},
            "frozen_bytes": fleet.base.bytes,
            "rounds": trainer.max_epochs,
            "seed": fleet.seed,
            "ranks": fleet.ranks.world,
            "device": name,
            "precision": str(trainer.precision),
            "personal": (fleet.algorithm.holds or _kept(fleet.algorithm))
            + ", with tensors of its own" * bool(fleet.personal),
            "evaluate_at": evaluation.at,
            "evaluated_clients": len(evaluation.clients),
            "side_by_side": fleet.training.side_by_side,
        }
        | fleet.algorithm.environment(fleet)
    )


def _kept(algorithm: Hooks) -> str:
    """What a client tests if its algorithm does not say; empty if only the algorithm knows."""
    if type(algorithm).models is not Hooks.models:
        return ""
    return "the model that it keeps" if algorithm.stateful else "the server's model"


def software() -> dict[str, str]:
    """Versions, the commit and the command."""
    return _versions() | {"command": " ".join(sys.argv)}


@cache
def _versions() -> dict[str, str]:
    """Versions of packages and the commit, which stay while a process runs."""
    versions = {"python": platform.python_version(), "lightfed": __version__}
    for package in _PACKAGES.split():
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions | {"commit": commit()}
