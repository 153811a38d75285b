"""The state of a federation in a checkpoint, and what a run must share with it to resume."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch

from lightfed.api.fleet import Fleet
from lightfed.local.local_work import RoundPlan
from lightfed.local.session import Report
from lightfed.runs.checkpoint import CLIENTS
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError, of_users_code, reason, require, tracebacks
from lightfed.utils.keys import digest

FINGERPRINT = "lightfed_fingerprint"
METRICS = "lightfed_round_metrics"  # of a round that is trained but may not be validated
_CLOCK = "lightfed_clock"
_BYTES, _FLOPS = "lightfed_bytes", "lightfed_flops"
_LR = "lightfed_lr"  # of the last round: sessions in an evaluation train with it
_OPTIMIZERS = "lightfed_server_optimizers"
_UPDATES = "lightfed_updates"  # steps of each client's optimizers
_TESTS = "lightfed_round_tests"  # of the last round
_VERSION = "pytorch-lightning_version"
# What every checkpoint of a run holds, and of which type; None may stand for what a run lacks.
_PARTS: dict[str, tuple[type, ...]] = {
    "state_dict": (dict,),
    "epoch": (int,),
    "global_step": (int,),
    _VERSION: (str,),
    FINGERPRINT: (dict,),
    METRICS: (dict,),
    _CLOCK: (dict, NoneType),
    _BYTES: (torch.Tensor,),
    _FLOPS: (torch.Tensor,),
    _LR: (float, NoneType),
    _OPTIMIZERS: (dict,),
    _UPDATES: (torch.Tensor,),
    _TESTS: (dict,),
    CLIENTS: (list,),
}
_ANOTHER = "give another checkpoint"


def check_parts(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Reject a checkpoint that lacks a part of a run's, or has another thing in its place.

    Raises:
        UserError: Names the file and the part.
    """
    for name, kinds in _PARTS.items():
        require(name in checkpoint, "ckpt_path", f"{path} lacks {name}", _ANOTHER)
        value = checkpoint[name]
        found = f"{path} has a {type(value).__name__} as {name}"
        require(isinstance(value, kinds), "ckpt_path", found, _ANOTHER)
    version = checkpoint[_VERSION]
    found = f"{path} has {version!r} as {_VERSION}"
    require(re.match(r"\d+\.\d+", version) is not None, "ckpt_path", found, _ANOTHER)


def check_values(
    theirs: Mapping[str, Any], ours: Mapping[str, torch.Tensor], models: Collection[str], path: Any
) -> None:
    """Reject server state of other names, shapes or types, and models that are not numbers.

    Args:
        theirs: The state dict of a checkpoint.
        ours: That of the run that resumes from it.
        models: The names of the rows of the server's models.
        path: Of the checkpoint.

    Raises:
        UserError: Names the file and the tensor.
    """
    unlike = sorted(theirs.keys() ^ ours.keys())
    found = f"{path}: its state_dict and this run's differ in {', '.join(unlike[:3])}"
    require(not unlike, "ckpt_path", found, _ANOTHER)
    for name, own in ours.items():
        value = theirs[name]
        tensor = isinstance(value, torch.Tensor)
        found = f"{path} has a {type(value).__name__} as {name}"
        require(tensor, "ckpt_path", found, _ANOTHER)
        alike = value.shape == own.shape and value.dtype == own.dtype
        found = f"{path} has {name} as {list(value.shape)} {value.dtype}"
        fits = f"this run's is {list(own.shape)} {own.dtype}"
        require(alike, "ckpt_path", f"{found}, {fits}", _ANOTHER)
        broken = name in models and bool(value.isnan().any())
        found = f"{path}: {name}, the server's model, has values that are no numbers"
        require(not broken, "ckpt_path", found, "give an earlier checkpoint")


@contextmanager
def restoring(path: Any) -> Iterator[None]:
    """Report in one line what cannot be restored; a user's code says it itself.

    Raises:
        UserError: Names the file, and what has failed.
    """
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        if of_users_code(e) is not None:
            raise
        tracebacks.debug("a checkpoint cannot be restored", exc_info=e)
        raise UserError("ckpt_path", f"{path} cannot be restored ({reason(e)})", _ANOTHER) from e


def fingerprint(fleet: Fleet, partition: str, server: Mapping[str, Any]) -> dict[str, Any]:
    """Properties that a checkpoint and the run that resumes from it must share.

    `partition` is the digest of the split of the data, `server` the server's state dict.
    """
    return {
        "algorithm": type(fleet.algorithm).__name__,
        "groups": [[s.name, s.group.count] for s in fleet.groups],
        "architectures": [digest(s.layout.signature()) for s in fleet.groups],
        **{
            f"frozen {name} of {state.name}": text
            for state, own in zip(fleet.groups, fleet.base.digests, strict=True)
            for name, text in own.items()
        },
        "seed": fleet.seed,
        "model.side_by_side": [state.packing.most for state in fleet.groups],
        "model.server_optimizer": fleet.server_step.rule,
        "model.personal": sorted(fleet.personal),
        "model.keep_optimizer": fleet.optimizers is not None,
        "model.local_penalty": [type(penalty).__name__ for penalty in fleet.penalties],
        "partition": partition,
        "server state": digest({name: list(value.shape) for name, value in server.items()}),
    }


def check_same(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Reject a checkpoint with another fingerprint; a UserError names the first difference."""
    for name, value in ours.items():
        other = theirs.get(name)
        found = f"a checkpoint of another federation: its {name} is {other}, this run's is {value}"
        fix = "resume with the configuration it was made with, config.yaml in its run folder"
        fix += ", and the same data and version of numpy" * (name == "partition")
        require(other == value, "ckpt_path", found, fix)


def save(fleet: Fleet) -> dict[str, Any]:
    """The entries of a checkpoint: tensors and primitives; rows only if clients keep theirs."""
    entries = {
        _TESTS: {moment: [asdict(r) for r in found] for moment, found in fleet.tests.items()},
        _LR: fleet.plan.lr,
        _CLOCK: fleet.clock.state_dict(),
        _BYTES: torch.from_numpy(fleet.ledger.bytes.copy()),
        _FLOPS: torch.from_numpy(fleet.ledger.flops.copy()),
        _UPDATES: torch.from_numpy(fleet.updates.copy()),
        _OPTIMIZERS: {name: own.state_dict() for name, own in fleet.server_step.optimizers.items()},
    }
    states = fleet.states()
    return entries if states is None else entries | {CLIENTS: states}


def load(fleet: Fleet, checkpoint: Mapping[str, Any]) -> None:
    """Restore what `save` returned, from all shards of a checkpoint."""
    tests = checkpoint[_TESTS]
    fleet.tests = {moment: [Report(**r) for r in found] for moment, found in tests.items()}
    fleet.plan = RoundPlan(lr=checkpoint[_LR])
    for name, own in (
        (_BYTES, fleet.ledger.bytes),
        (_FLOPS, fleet.ledger.flops),
        (_UPDATES, fleet.updates),
    ):
        _restore(own, checkpoint[name], name)
    fleet.clock.load_state_dict(checkpoint[_CLOCK])
    models = dict(fleet.algorithm.named_modules())
    for name, state in checkpoint[_OPTIMIZERS].items():
        model = models[name]
        assert isinstance(model, ServerModel)
        fleet.server_step.of(model).load_state_dict(state)
    fleet.load_states(checkpoint[CLIENTS])


def _restore(own: np.ndarray, saved: torch.Tensor, name: str) -> None:
    """Copy a counter of all clients; an assignment alone would repeat a smaller one, or round."""
    found = saved.numpy()
    if found.shape != own.shape or found.dtype != own.dtype:
        raise ValueError(f"{name} is of shape {list(found.shape)} and type {found.dtype}")
    own[:] = found
