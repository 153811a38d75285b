"""The keys of a run: those of its configuration, and the columns of its tables."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import isclass, isfunction
from typing import Any, Literal, NamedTuple, cast

# What depends on a key:
# - `result`: what a round computes.
# - `seed`: likewise, but runs that differ in it alone are one experiment.
# - `extent`: how long a run is. It may change when a run resumes, but makes another experiment.
# - `how`: no result, though perhaps in which rounds it is measured.
Role = Literal["result", "seed", "extent", "how"]


class Key(NamedTuple):
    """A key of a configuration, with all below it.

    Attributes:
        role: What depends on it.
        column: Its name in reports, which comes before those of keys below it. Empty if only these
            have names, and None if reports do not name it.
        unit: The unit of the value.
        term: Whether methods must agree in it to be compared: it decides what is measured.
    """

    role: Role
    column: str | None = None
    unit: str = ""
    term: bool = False


# A line is a key, its role, its column and its unit. The role `term` is a result in which compared
# methods must agree. The column is - for none, and = for the names of the keys below it alone.
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
model.local_seconds             result  local_seconds               s
model.evaluate                  term
model.evaluate_at               term    evaluate_at
model.eval_clients              term    -                           clients
model.unseen_epochs             result  unseen_epochs               epochs
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
data.validation                 term    validation
data.unseen                     term    unseen
data.channels_last              result
data.last_batch                 result  last_batch
data.chunks                     result  chunks
data.resident                   how
"""
# The values of a group's `level`, and the widths that HeteroFL's paper gives them.
LEVELS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}

# Where samples lie. Jobs copy them to local disks.
_LOCATIONS = frozenset({"root", "download"})
_SECTIONS = ("trainer.", "model.", "data.")
# Parts of a key that its name in reports leaves out.
_UNSPOKEN = frozenset({"", "init_args", "class_path"})


def _parsed(line: str) -> tuple[str, Key]:
    """Return a key and what is known of it, from a line of the table."""
    words = line.split()
    key, role = words[:2]
    column = words[2] if len(words) > 2 else "-"
    unit = words[3] if len(words) > 3 else ""

    is_term = role == "term"
    return key, Key(
        role=cast(Role, "result" if is_term else role),
        column=None if column == "-" else column.removeprefix("="),
        unit=unit.replace("_", " "),
        term=is_term,
    )


KEYS = dict(_parsed(line) for line in _KEYS.strip().splitlines())


@cache
def key_of(key: str) -> Key:
    """Return what is known of a dotted key, by itself or by one above it.

    A key that no table has is a result. Below a result, a part with `seed` in its name is a seed.
    Below `data`, `root` and `download` depend on the machine.
    """
    section, *parts = key.split(".")
    listed = _listed(key)
    if listed:
        known = KEYS[listed]
    else:
        known = Key("result", column="" if section in ("model", "data") else None)

    if known.role == "result" and any("seed" in part.lower() for part in (section, *parts)):
        return known._replace(role="seed")
    if section == "data" and not _LOCATIONS.isdisjoint(parts):
        return known._replace(role="how")
    return known


def column_of(key: str) -> str:
    """Return the name of a key in reports, such as `lr` or `clients 0 rate`."""
    listed = _listed(key)
    below = key.removeprefix(listed)
    words = [word for word in below.split(".") if word not in _UNSPOKEN]
    if not listed and words[0] in ("model", "data"):
        words = words[1:]

    column = KEYS[listed].column if listed else None
    if column:
        words = [column, *words]
    if words:
        return " ".join(words)
    # A key that reports do not name.
    return listed.rpartition(".")[2]


def long_name(key: str) -> str:
    """Return the whole of a key below its section, such as `optimizer lr`."""
    words = key.split(".")[1:]
    return " ".join(word for word in words if word not in _UNSPOKEN)


def _listed(key: str) -> str:
    """Return the key of the table that a key is, or is below; empty without any."""
    while key and key not in KEYS:
        key = key.rpartition(".")[0]
    return key


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run resumes as: the values on which results depend, and seeds.

    Args:
        config: A configuration with its sections.

    Returns:
        The values by their dotted keys.
    """
    sections = {name: config[name] for name in ("trainer", "model", "data")}
    values = {}
    for key, value in flat(sections):
        if value is not None and key_of(key).role in ("result", "seed"):
            values[key] = value
    return values


def _text_of(value: Any) -> str:
    """Return a text of an object that every process gives alike.

    So it has no address, which no other process has.
    """
    if isclass(value) or isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that stand for anything that JSON can write."""
    text = json.dumps(value, sort_keys=True, default=_text_of)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def experiment(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run is an experiment of.

    Args:
        values: The values of a configuration by their dotted keys, as texts or not.

    Returns:
        The `digest`, 16 hexadecimal digits: runs with an equal one differ at most in seeds. And the
        `settings`: the texts of the values that make another experiment and that reports name.
    """
    texts = {}
    settings = {}
    for key, value in values.items():
        known = key_of(key)
        if not key.startswith(_SECTIONS) or known.role not in ("result", "extent"):
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        if text == "null":
            continue
        texts[key] = text
        if known.column is not None:
            settings[key] = text
    return {"digest": digest(texts), "settings": settings}


def terms(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in which methods must agree to be compared.

    Seeds of data are among them, but not where the data lie.

    Args:
        values: The values of a configuration by their dotted keys.

    Returns:
        The values by their dotted keys, and the number of `clients`.
    """
    agreed: dict[str, Any] = {}
    num_clients = 0
    for key, value in values.items():
        if re.fullmatch(r"model\.clients\.\d+\.count", key):
            num_clients += value
        known = key_of(key)
        if value is not None and known.term and known.role != "how":
            agreed[key] = value
    return {**agreed, "clients": num_clients}


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings and lists, with their dotted keys.

    An empty mapping or list is a value itself.
    """
    items = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if not isinstance(items, Mapping) or not items:
        yield path, value
        return
    for key, item in items.items():
        yield from flat(item, f"{path}.{key}".lstrip("."))


class Column(NamedTuple):
    """A column that lightfed itself writes; all others are metrics.

    Attributes:
        tables: The csv files that have it, without their ending.
        unit: The unit of a value; empty for a plain number.
        meaning: What it means, for readers.
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
    "joules": Column("metrics clients", "J", "spent by devices; in a round, or in all"),
    "late": Column("metrics", "", "sessions of the round whose updates came too late"),
    "deadline": Column("metrics", "s", "virtual: how long the server would wait at most"),
}
