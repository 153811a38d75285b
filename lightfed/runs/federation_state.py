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
from lightfed.utils.errors import UserError, of_users_code, reason, tracebacks
from lightfed.utils.keys import digest

FINGERPRINT = "lightfed_fingerprint"

# The metrics of a round that has been trained and perhaps not been validated.
METRICS = "lightfed_round_metrics"

_BYTES = "lightfed_bytes"
_CLOCK = "lightfed_clock"
_FLOPS = "lightfed_flops"
_LR = "lightfed_lr"  # of the last round: sessions in an evaluation train with it
_OPTIMIZERS = "lightfed_server_optimizers"
_TESTS = "lightfed_round_tests"  # of the last round
_UPDATES = "lightfed_updates"  # the number of steps of each client's optimizers
_VERSION = "pytorch-lightning_version"

# The types of what every checkpoint of a run holds. None is there for what a run does not have.
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
    """Check that a checkpoint has all parts of a run's, and of their types.

    Args:
        checkpoint: The content of the checkpoint.
        path: Its main file, for the error.

    Raises:
        UserError: Names the file and the part.
    """
    for name, types in _PARTS.items():
        if name not in checkpoint:
            raise UserError("ckpt_path", f"{path} lacks {name}", _ANOTHER)
        value = checkpoint[name]
        if not isinstance(value, types):
            raise UserError("ckpt_path", f"{path} has a {type(value).__name__} as {name}", _ANOTHER)

    version = checkpoint[_VERSION]
    if re.match(r"\d+\.\d+", version) is None:
        raise UserError("ckpt_path", f"{path} has {version!r} as {_VERSION}", _ANOTHER)


def check_values(
    theirs: Mapping[str, Any], ours: Mapping[str, torch.Tensor], models: Collection[str], path: Any
) -> None:
    """Check that the server's state in a checkpoint fits a run, and that its models are finite.

    Args:
        theirs: The state dict of a checkpoint.
        ours: The state dict of the run that resumes from it.
        models: The names of the rows of the server's models.
        path: The main file of the checkpoint, for the error.

    Raises:
        UserError: Names the file and the tensor that is missing, unknown, of another shape or type,
            or of a model with values that are not numbers.
    """
    different_names = sorted(theirs.keys() ^ ours.keys())
    if different_names:
        names = ", ".join(different_names[:3])
        found = f"{path}: its state_dict and this run's differ in {names}"
        raise UserError("ckpt_path", found, _ANOTHER)

    for name, our_tensor in ours.items():
        tensor = theirs[name]
        if not isinstance(tensor, torch.Tensor):
            found = f"{path} has a {type(tensor).__name__} as {name}"
            raise UserError("ckpt_path", found, _ANOTHER)

        if tensor.shape != our_tensor.shape or tensor.dtype != our_tensor.dtype:
            found = (
                f"{path} has {name} as {list(tensor.shape)} {tensor.dtype}, "
                f"this run's is {list(our_tensor.shape)} {our_tensor.dtype}"
            )
            raise UserError("ckpt_path", found, _ANOTHER)

        if name in models and bool(tensor.isnan().any()):
            found = f"{path}: {name}, the server's model, has values that are not numbers"
            raise UserError("ckpt_path", found, fix="give an earlier checkpoint")


@contextmanager
def restoring(path: Any) -> Iterator[None]:
    """Report in one line what cannot be restored in a block; a user's code reports itself.

    Args:
        path: The main file of the checkpoint, for the error.

    Raises:
        UserError: Names the file, and what has failed.
    """
    try:
        yield
    except UserError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        if of_users_code(error) is not None:
            raise
        tracebacks.debug("a checkpoint cannot be restored", exc_info=error)
        found = f"{path} cannot be restored ({reason(error)})"
        raise UserError("ckpt_path", found, _ANOTHER) from error


def fingerprint(fleet: Fleet, partition: str, server: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that a checkpoint and the run that resumes from it must share.

    Args:
        fleet: The federation.
        partition: The digest of the split of the data.
        server: The server's state dict.
    """
    frozen_digests = {}
    for state, digests in zip(fleet.groups, fleet.base.digests, strict=True):
        for name, text in digests.items():
            frozen_digests[f"frozen {name} of {state.name}"] = text

    return {
        "algorithm": type(fleet.algorithm).__name__,
        "groups": [[state.name, state.group.count] for state in fleet.groups],
        "architectures": [digest(state.layout.signature()) for state in fleet.groups],
        **frozen_digests,
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
    """Check that a checkpoint and a run have the same fingerprint.

    Args:
        theirs: The fingerprint of the checkpoint.
        ours: The fingerprint of the run that resumes from it.

    Raises:
        UserError: Names the first difference.
    """
    for name, value in ours.items():
        other_value = theirs.get(name)
        if other_value == value:
            continue

        fix = "resume with the configuration it was made with, config.yaml in its run folder"
        if name == "partition":
            fix += ", and the same data and version of numpy"
        raise UserError(
            key="ckpt_path",
            found=f"a checkpoint of another federation: its {name} is {other_value}, "
            f"this run's is {value}",
            fix=fix,
        )


def save(fleet: Fleet) -> dict[str, Any]:
    """Return the entries of a checkpoint, which are tensors and primitives.

    The rows of clients are among them if clients keep theirs.
    """
    tests = {}
    for moment, reports in fleet.tests.items():
        tests[moment] = [asdict(report) for report in reports]

    optimizers = {}
    for name, optimizer in fleet.server_step.optimizers.items():
        optimizers[name] = optimizer.state_dict()

    # Copies, because the checkpoint may be written while the next round counts on.
    entries: dict[str, Any] = {
        _TESTS: tests,
        _LR: fleet.plan.lr,
        _CLOCK: fleet.clock.state_dict(),
        _BYTES: torch.from_numpy(fleet.ledger.bytes.copy()),
        _FLOPS: torch.from_numpy(fleet.ledger.flops.copy()),
        _UPDATES: torch.from_numpy(fleet.updates.copy()),
        _OPTIMIZERS: optimizers,
    }

    states = fleet.states()
    if states is not None:
        entries[CLIENTS] = states
    return entries


def load(fleet: Fleet, checkpoint: Mapping[str, Any]) -> None:
    """Restore what `save` has returned, from all shards of a checkpoint."""
    tests = {}
    for moment, reports in checkpoint[_TESTS].items():
        tests[moment] = [Report(**report) for report in reports]
    fleet.tests = tests

    fleet.plan = RoundPlan(lr=checkpoint[_LR])

    _restore_counter(fleet.ledger.bytes, checkpoint[_BYTES], _BYTES)
    _restore_counter(fleet.ledger.flops, checkpoint[_FLOPS], _FLOPS)
    _restore_counter(fleet.updates, checkpoint[_UPDATES], _UPDATES)
    fleet.clock.load_state_dict(checkpoint[_CLOCK])

    models = dict(fleet.algorithm.named_modules())
    for name, state in checkpoint[_OPTIMIZERS].items():
        model = models[name]
        assert isinstance(model, ServerModel)
        fleet.server_step.of(model).load_state_dict(state)

    fleet.load_states(checkpoint[CLIENTS])


def _restore_counter(counter: np.ndarray, saved: torch.Tensor, name: str) -> None:
    """Copy a saved counter of all clients into the one of this run.

    An assignment alone would repeat a smaller array, and round values of another type.
    """
    values = saved.numpy()
    if values.shape != counter.shape or values.dtype != counter.dtype:
        raise ValueError(f"{name} is of shape {list(values.shape)} and type {values.dtype}")
    counter[:] = values
