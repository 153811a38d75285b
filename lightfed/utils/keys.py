"""The keys of a run: those of its configuration, and the columns of its tables."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

Role = Literal["result", "seed", "extent", "how"]

_HOW_DATA = {"root", "download"}  # where a data set lies; jobs copy it to local disks


def role(key: str) -> Role:
    """What depends on a key of a configuration, given dotted from its section.

    `result`: what a round computes. `seed`: likewise, as one of many equal draws: runs that differ
    in it alone are one experiment. `how`: neither.
    """
    parts = key.split(".")
    if parts[0] == "data" and parts[-1] in _HOW_DATA:
        return "how"
    return "seed" if any("seed" in part.lower() for part in parts) else "result"


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings and lists, by their dotted keys."""
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(parts, Mapping):
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
    "cohort": Column("clients", "", "name of its group"),
    "samples": Column("clients", "", "test samples of the client"),
    "bytes_up": Column("metrics clients", "B", "sent by clients in training"),
    "bytes_down": Column("metrics clients", "B", "received by clients in training"),
    "server_bytes": Column("metrics", "B", "sent between servers"),
    "flops": Column("metrics clients", "FLOPs", "computed by clients in training"),
    "stored_bytes": Column("clients", "B", "kept by the client between its sessions"),
    "wire_bytes": Column("metrics", "B", "sent between ranks"),
    "seconds": Column("metrics", "s", "wall-clock time of the round"),
    "virtual_time": Column("metrics", "s", "on the virtual clock of the devices, from the start"),
    "moved": Column("timings", "", "rows of clients that moved between ranks"),
}
