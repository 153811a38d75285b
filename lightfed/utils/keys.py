"""The keys of a run: the columns of its tables."""

from typing import NamedTuple


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
