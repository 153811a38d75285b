"""The keys of a run: those of its configuration, and the columns of its tables."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import isclass, isfunction
from typing import Any, Literal, NamedTuple, cast

# What depends on a key. `result`: what a round computes. `seed`: likewise, but runs that differ in
# it alone are one experiment. `extent`: how long a run is; it may change when a run resumes, but
# makes another experiment. `how`: no result, though perhaps in which rounds it is measured.
Role = Literal["result", "seed", "extent", "how"]


class Key(NamedTuple):
    """A key of a configuration, with all below it.

    Attributes:
        role: what depends on it.
        column: its name in reports, before those of keys below it; None if reports do not name it.
        unit: of the value.
        term: whether methods must agree in it to be compared: it decides what is measured.
    """

    role: Role
    column: str | None = None
    unit: str = ""
    term: bool = False


# key, role (term: a result in which compared methods must agree), column (- for none, = for the
# names of the keys below it alone) and unit
_KEYS = """
ckpt_path                       how
trainer.name                    how
trainer.max_epochs              extent  max_epochs                  rounds
trainer.min_epochs              extent  -                           rounds
trainer.max_steps               extent  -                           server_updates
trainer.max_time                extent  -                           wall_clock
trainer.accelerator             how
trainer.devices                 how
trainer.num_nodes               how
trainer.precision               result  precision
trainer.strategy                how
trainer.logger                  how
trainer.callbacks               extent
trainer.fast_dev_run            how
trainer.limit_train_batches     result
trainer.limit_val_batches       term
trainer.limit_test_batches      how
trainer.check_val_every_n_epoch how     -                           rounds
trainer.enable_checkpointing    how
trainer.checkpoint_every        how     -                           rounds
trainer.enable_progress_bar     how
trainer.gradient_clip_val       result  gradient_clip_val
trainer.gradient_clip_algorithm result  gradient_clip_algorithm
trainer.deterministic           how
trainer.benchmark               how
trainer.profiler                how
trainer.detect_anomaly          how
trainer.plugins                 how
trainer.default_root_dir        how
trainer.num_threads             how
trainer.ranks_per_device        how
trainer.enable_page             how
model.algorithm                 result  =
model.clients                   result  clients
model.optimizer                 result  =
model.server_optimizer          result  server_optimizer
model.personal                  result  personal
model.local_penalty             result  local_penalty
model.keep_optimizer            result  keep_optimizer
model.lr_schedule               result  lr_schedule
model.fraction                  result  fraction
model.clients_per_round         result  clients_per_round
model.local_epochs              result  local_epochs
model.local_steps               result  local_steps
model.evaluate                  term
model.evaluate_at               term    evaluate_at
model.eval_clients              term    -                           clients
model.store                     how
model.side_by_side              result  side_by_side                clients
model.pack_memory               result  pack_memory                 MiB
model.max_failed_clients        result  max_failed_clients          sessions
model.devices                   result  devices
model.policy                    result  policy
model.assign                    result  assign
model.export                    how
model.seed                      seed
data.dataset                    term    dataset
data.partition                  term    partition
data.batch_size                 result  batch_size                  samples
data.eval_batch_size            result  -                           samples
data.personal_test              term    personal_test
data.train_fraction             term    train_fraction
data.channels_last              result
data.last_batch                 result  last_batch
data.chunks                     result  chunks
data.resident                   how
"""
# the values of a group's `level`, and the widths that HeteroFL's paper gives them
LEVELS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
_PLACES = {"root", "download"}  # where samples lie: jobs copy them to local disks
_SECTIONS = ("trainer.", "model.", "data.")
_UNSPOKEN = {"", "init_args", "class_path"}  # parts of a key that its name leaves out


def _key(key: str, role: str, column: str = "-", unit: str = "") -> tuple[str, Key]:
    named = None if column == "-" else column.removeprefix("=")
    plain = cast(Role, "result" if role == "term" else role)
    return key, Key(plain, named, unit.replace("_", " "), term=role == "term")


KEYS = dict(_key(*line.split()) for line in _KEYS.strip().splitlines())


@cache
def key_of(key: str) -> Key:
    """What is known of a dotted key, by itself or one above it; one of no table is a result.

    Below a result, a part with `seed` in its name is a seed. Below `data`, `root` and `download`
    depend on the machine.
    """
    section, *parts = key.split(".")
    known = KEYS.get(_listed(key), Key("result", "" if section in ("model", "data") else None))
    if known.role == "result" and any("seed" in part.lower() for part in (section, *parts)):
        return known._replace(role="seed")
    if section == "data" and _PLACES.intersection(parts):
        return known._replace(role="how")
    return known


def column_of(key: str) -> str:
    """The name of a key in reports, such as `lr` or `clients 0 rate`."""
    listed = _listed(key)
    above = KEYS[listed].column if listed else None
    words = [w for w in key.removeprefix(listed).split(".") if w not in _UNSPOKEN]
    if not listed and words[0] in ("model", "data"):
        words = words[1:]
    return " ".join(filter(None, (above, *words))) or listed.rpartition(".")[2]


def long_name(key: str) -> str:
    """The whole of a key below its section, such as `optimizer lr`."""
    return " ".join(word for word in key.split(".")[1:] if word not in _UNSPOKEN)


def _listed(key: str) -> str:
    """The key of the table that it is or is below; empty without any."""
    while key and key not in KEYS:
        key = key.rpartition(".")[0]
    return key


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run resumes as: the values of a configuration on which results depend, and seeds."""
    sections = {name: config[name] for name in ("trainer", "model", "data")}
    values = {key: value for key, value in flat(sections) if value is not None}
    return {key: value for key, value in values.items() if key_of(key).role in ("result", "seed")}


def _named(value: Any) -> str:
    """A text of an object that every process gives alike: not its address, which no other has."""
    if isclass(value) or isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def digest(value: Any) -> str:
    """Of anything that JSON can write: 16 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, default=_named)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def experiment(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is of: runs with one `digest` (16 hexadecimal digits) differ at most in seeds.

    `values` are those of a configuration by their dotted keys, text or not. `settings` are the
    texts of those that make another experiment and that reports name.
    """
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in values.items()
        if key.startswith(_SECTIONS) and key_of(key).role in ("result", "extent")
    }
    stated = {key: text for key, text in texts.items() if text != "null"}
    named = {key: text for key, text in stated.items() if key_of(key).column is not None}
    return {"digest": digest(stated), "settings": named}


def terms(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values in which methods must agree to be compared, by dotted keys; and their `clients`.

    Seeds of data are among them, but not where the data lie.
    """
    stated = {k: v for k, v in values.items() if v is not None and key_of(k).role != "how"}
    counts = [v for k, v in values.items() if re.fullmatch(r"model\.clients\.\d+\.count", k)]
    return {k: v for k, v in stated.items() if key_of(k).term} | {"clients": sum(counts)}


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings and lists, by their dotted keys; an empty one is a value."""
    parts = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if not isinstance(parts, Mapping) or not parts:
        yield path, value
        return
    for key, part in parts.items():
        yield from flat(part, f"{path}.{key}".lstrip("."))


class Column(NamedTuple):
    """A column that lightfed itself writes; all others are metrics.

    Attributes:
        tables: the csv files that have it, without their ending.
        unit: of a value; empty for a plain number.
        meaning: for readers.
    """

    tables: str
    unit: str
    meaning: str


COLUMNS = {
    "round": Column("metrics clients timings", "", "number of finished rounds"),
    "participants": Column("metrics", "", "sessions of the round"),
    "excluded": Column("metrics", "", "of these, left out: failed, or the update is not finite"),
    "client": Column("clients", "", "number of the client, from 0"),
    "group": Column("clients", "", "name of its group"),
    "samples": Column("clients", "", "test samples of the client"),
    "bytes_up": Column("metrics clients", "B", "sent by clients in training"),
    "bytes_down": Column("metrics clients", "B", "received by clients in training"),
    "server_bytes": Column("metrics", "B", "sent between servers"),
    "flops": Column("metrics clients", "FLOPs", "computed by clients in training"),
    "stored_bytes": Column("clients", "B", "kept by the client between its sessions"),
    "wire_bytes": Column("metrics", "B", "sent between ranks"),
    "seconds": Column("metrics", "s", "wall-clock time of the round"),
    "virtual_time": Column("metrics", "s", "on the virtual clock of the devices, from the start"),
    "busy_time": Column("metrics clients", "s", "virtual: at work; mean of a round, or in all"),
    "idle_time": Column("metrics clients", "s", "virtual: not at work; mean of a round, or in all"),
    "late": Column("metrics", "", "sessions of the round whose updates came too late"),
}
