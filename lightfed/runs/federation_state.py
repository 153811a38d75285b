"""The state of a federation in a checkpoint, and what a run must share with it to resume."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from lightfed.api.fleet import Fleet
from lightfed.local.local_work import RoundPlan
from lightfed.local.session import Report
from lightfed.runs.checkpoint import CLIENTS
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import require
from lightfed.utils.keys import digest

_CLOCK = "lightfed_clock"
_LEDGER = "lightfed_ledger"
_LR = "lightfed_lr"  # of the last round: sessions in an evaluation train with it
_OPTIMIZERS = "lightfed_server_optimizers"
_UPDATES = "lightfed_updates"  # steps of each client's optimizers
_TESTS = "lightfed_round_tests"  # of the last round


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
        _CLOCK: None if fleet.clock is None else fleet.clock.state_dict(),
        _LEDGER: torch.from_numpy(fleet.ledger.totals.copy()),
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
    fleet.ledger.totals[:] = checkpoint[_LEDGER].numpy()
    fleet.updates[:] = checkpoint[_UPDATES].numpy()
    if fleet.clock is not None:
        fleet.clock.load_state_dict(checkpoint[_CLOCK])
    models = dict(fleet.algorithm.named_modules())
    for name, state in checkpoint[_OPTIMIZERS].items():
        model = models[name]
        assert isinstance(model, ServerModel)
        fleet.server_step.of(model).load_state_dict(state)
    fleet.load_states(checkpoint[CLIENTS])
