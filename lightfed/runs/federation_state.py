"""The state of a federation in a checkpoint, and what a run must share with it to resume."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from lightfed.api.fleet import Fleet
from lightfed.distributed.placement import RATES
from lightfed.local.session import Report
from lightfed.runs.checkpoint import CLIENTS
from lightfed.utils.atomic_io import check_like
from lightfed.utils.errors import require

_FRUITLESS = "lightfed_fruitless_rounds"
_LEDGER = "lightfed_ledger"
_LR = "lightfed_lr"  # of the last round: sessions in an evaluation train with it
_TESTS = "lightfed_round_tests"  # of the last round
# The trainer's keys that results depend on. A run may be extended, or resumed with another number
# of ranks or other callbacks.
_TRAINER = """
precision limit_train_batches limit_val_batches gradient_clip_val gradient_clip_algorithm
"""
# Keys of the model and the data that no result depends on.
_HOW = {"export", "store", "store_folder", "exchange_buffer", "resident"}


def config_digest(options: Mapping[str, Any]) -> str:
    """Digest of a sub-command's options, as parsed: 16 hexadecimal digits."""
    text = json.dumps(_relevant(options), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The keys on which results depend that differ in two configurations: [before, now] each."""
    one, other = (dict(_flat(_relevant(options))) for options in (before, now))
    keys = sorted(one.keys() | other.keys())
    pairs = {key: [one.get(key), other.get(key)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _relevant(options: Mapping[str, Any]) -> dict[str, Any]:
    trainer = {key: options["trainer"].get(key) for key in _TRAINER.split()}
    model, data = (
        {key: value for key, value in options[part].items() if key not in _HOW}
        for part in ("model", "data")
    )
    return {"model": model, "data": _placeless(data), "trainer": trainer}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings and lists, by their dotted keys."""
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(parts, Mapping):
        yield path, value
        return
    for key, part in parts.items():
        yield from _flat(part, f"{path}.{key}".lstrip("."))


def _placeless(data: Any) -> Any:
    """The data section without the folder of a data set: jobs copy it to local disks."""
    if isinstance(data, Mapping):
        return {key: _placeless(value) for key, value in data.items() if key != "root"}
    return data


def fingerprint(fleet: Fleet, partition: str, server: Mapping[str, Any]) -> dict[str, Any]:
    """Properties that a checkpoint and the run that resumes from it must share.

    `partition` is the digest of the split of the data, `server` the server's state dict.
    """
    return {
        "algorithm": type(fleet.algorithm).__name__,
        "groups": [[s.name, s.group.count] for s in fleet.groups],
        "architectures": [_digest(s.layout.signature()) for s in fleet.groups],
        "seed": fleet.seed,
        "partition": partition,
        "server state": _digest({name: list(value.shape) for name, value in server.items()}),
    }


def check_same(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Reject a checkpoint with another fingerprint; a UserError names the first difference."""
    for name, value in ours.items():
        other = theirs.get(name)
        found = f"a checkpoint of another federation: its {name} is {other}, this run's is {value}"
        fix = "resume with the configuration it was made with: config.yaml in its run folder"
        require(other == value, "ckpt_path", found, fix)


def save(fleet: Fleet) -> dict[str, Any]:
    """The entries of a checkpoint: tensors and primitives; rows only if clients keep theirs."""
    entries = {
        _FRUITLESS: fleet.fruitless_rounds,
        _TESTS: {moment: [asdict(r) for r in found] for moment, found in fleet.tests.items()},
        _LR: fleet.training.lr,
        RATES: fleet.rates.state_dict(),
        _LEDGER: torch.from_numpy(fleet.ledger.totals.copy()),
    }
    states = fleet.states()
    return entries if states is None else entries | {CLIENTS: states}


def load(fleet: Fleet, checkpoint: Mapping[str, Any]) -> None:
    """Restore what `save` returned, from all shards of a checkpoint.

    Raises a ValueError or another error if a value is missing or has another form.
    """
    totals = torch.from_numpy(fleet.ledger.totals)
    check_like(checkpoint, {_FRUITLESS: 0, _LEDGER: totals, CLIENTS: []}, "")
    check_like(checkpoint[_LR], None if checkpoint[_LR] is None else 0.0, _LR)
    fleet.fruitless_rounds = checkpoint[_FRUITLESS]
    tests = checkpoint[_TESTS]
    fleet.tests = {moment: [Report(**r) for r in found] for moment, found in tests.items()}
    fleet.training.lr = checkpoint[_LR]
    fleet.ledger.totals[:] = checkpoint[_LEDGER].numpy()
    fleet.load_states(checkpoint[CLIENTS])


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
