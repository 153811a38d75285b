"""The devices of clients: what they do in a second, their memory, and when they are available.

A client's device is that of its row in a table; else of its group; else of all clients. What is not
given takes neither time nor energy. Draws are named by (seed, purpose, round), and a client's draw
is the one at its number: it depends neither on ranks nor on who else takes part.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator
from typing_extensions import override

from lightfed.devices.delays import Delay, Distribution
from lightfed.utils.errors import UserError
from lightfed.utils.recorded import Recorded
from lightfed.utils.rng import numpy_generator

if TYPE_CHECKING:
    import pandas as pd

KEY = "model.devices"
Number = float | Distribution


@dataclass(frozen=True)
class Device:
    """What a device does in a second: a number for all clients, or a distribution over them.

    Attributes:
        flops: Floating-point operations per second.
        up: Bytes per second that it sends.
        down: Bytes per second that it receives.
        latency: Seconds until the first byte of a download or an upload arrives.
        memory: Bytes, for `model.assign`.
        joules_per_flop: Energy that a floating-point operation takes.
        joules_per_byte: Energy that a byte takes which the device sends or receives.
    """

    flops: Number | None = None
    up: Number | None = None
    down: Number | None = None
    latency: Number | None = None
    memory: Number | None = None
    joules_per_flop: Number | None = None
    joules_per_byte: Number | None = None


_UNITS = [unit.name for unit in fields(Device)]

# What may be 0, and is where it is not given; the others are infinite there.
_MAY_BE_ZERO = ("latency", "joules_per_flop", "joules_per_byte")


class Availability(Recorded, ABC):
    """Which clients can be asked to take part in a round."""

    @abstractmethod
    def there(self, before: np.ndarray, rng: Generator, now: float, t: int) -> np.ndarray:
        """Return how likely each client is available in round t, (N,).

        Clients with a value above 0 are available. If nobody is, the server asks the client with
        the largest value.

        Args:
            before: (N,) bool, which clients were available in the last round that asked.
            rng: The generator of the round.
            now: Virtual seconds since the start.
            t: Number of the round.
        """

    def next(self, now: float, among: np.ndarray) -> float:
        """Return when the next of some clients is available, in virtual seconds from the start.

        Args:
            now: Virtual seconds since the start; the result is not before.
            among: (N,) bool, the clients in question.
        """
        return now


@dataclass(frozen=True)
class Bernoulli(Availability):
    """Every client is available with the same probability in every round."""

    share: float
    """The probability."""

    def __post_init__(self) -> None:
        _check_probability("share", self.share)

    @override
    def there(self, before: np.ndarray, rng: Generator, now: float, t: int) -> np.ndarray:
        return self.share - rng.random(len(before))


@dataclass(frozen=True)
class OnOff(Availability):
    """A Markov chain over rounds for each client, which starts in its stationary distribution."""

    leave: float
    """Probability that an available client is gone in the next round."""
    come: float
    """Probability that a client that is gone is available in the next round."""

    def __post_init__(self) -> None:
        _check_probability("leave", self.leave)
        _check_probability("come", self.come)

    @override
    def there(self, before: np.ndarray, rng: Generator, now: float, t: int) -> np.ndarray:
        if t == 0:
            stationary = self.come / (self.come + self.leave)
            probability = np.full(len(before), stationary)
        else:
            probability = np.where(before, 1 - self.leave, self.come)
        return probability - rng.random(len(before))


@dataclass(frozen=True)
class Presence(Availability):
    """Intervals of virtual time in which clients are available, from a file."""

    path: Path
    """A .csv file with the columns client, from and to; a client may have several rows."""
    spans: np.ndarray = field(init=False, repr=False, compare=False)  # (rows, 3)

    def __post_init__(self) -> None:
        key = f"{KEY}.availability.init_args.path"
        columns = ["client", "from", "to"]
        spans = _read_table(key, self.path, columns)[columns].to_numpy(np.float64)
        clients, begin, end = spans.T

        is_interval = (clients >= 0) & (begin < end)  # False for NaN
        wrong = np.flatnonzero(~is_interval)
        if len(wrong):
            raise UserError(
                key,
                f"row {wrong[:1].tolist()} is not an interval of a client",
                "number clients from 0, and give from < to",
            )

        # Sorted by client, then by time: an interval can only overlap the one before it.
        order = np.lexsort((begin, clients))
        same_client = np.diff(clients[order]) == 0
        begins_early = begin[order[1:]] < end[order[:-1]]
        wrong = order[1:][same_client & begins_early]
        if len(wrong):
            raise UserError(
                key,
                f"row {wrong[:1].tolist()} overlaps another interval of the same client",
                "give disjoint intervals",
            )

        object.__setattr__(self, "spans", spans)

    @override
    def there(self, before: np.ndarray, rng: Generator, now: float, t: int) -> np.ndarray:
        is_there = np.zeros(len(before))
        clients, begin = self._intervals_after(now, len(before))
        is_there[clients[begin <= now]] = 1.0
        return is_there

    @override
    def next(self, now: float, among: np.ndarray) -> float:
        clients, begin = self._intervals_after(now, len(among))
        coming = begin[among[clients]]
        if len(coming) == 0:
            raise UserError(
                f"{KEY}.availability.init_args.path",
                f"no client is available after {now:g} virtual seconds",
                "give later intervals",
            )
        return max(now, float(coming.min()))

    def _intervals_after(self, now: float, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the clients and the begins of the intervals that have not ended, (rows,) each."""
        clients, begin, end = self.spans.T
        lasts = (clients < num_clients) & (end > now)
        return clients[lasts].astype(np.int64), begin[lasts]


@dataclass(frozen=True)
class Devices(Device):
    """The devices of all clients; what is not given takes neither time nor energy.

    Attributes:
        groups: Devices of single groups, by the name of the group. What one of them leaves out is
            as for all clients.
        table: A .csv file with the column client and any of flops, up, down, latency, memory,
            joules_per_flop and joules_per_byte, in the same units; it has a row for every client.
        delay: Additional virtual seconds of a session, drawn for each session.
        step_delay: Additional virtual seconds of a step of a session, or of what FedBCD's K counts,
            drawn for each session.
        server_up: Bytes per second that the server sends, which the clients of a round share.
        server_down: Bytes per second that the server receives, which the clients of a round share.
        availability: Which clients can take part in a round; all by default.
    """

    groups: dict[str, Device] = field(default_factory=dict)
    table: Path | None = None
    delay: Delay | None = None
    step_delay: Delay | None = None
    server_up: float | None = None
    server_down: float | None = None
    availability: Availability | None = None

    def of(self, counts: Mapping[str, int], *, seed: int) -> dict[str, np.ndarray]:
        """Return what a `Device` has, by name, for every client, (N,) each.

        Args:
            counts: Number of clients by the name of their group, in the order of the groups.
            seed: Of the run.

        Raises:
            UserError: A number is not positive, the table does not fit, or a group is unknown.
        """
        for name in self.groups:
            if name not in counts:
                raise UserError(
                    f"{KEY}.groups",
                    f"a device of group {[name]}",
                    f"name some of {', '.join(counts)}",
                )

        from_table = self._table_columns(sum(counts.values()))
        values = {}
        for name in _UNITS:
            if name in from_table:
                values[name] = from_table[name]
                _check_values(f"{KEY}.table", name, values[name])
            else:
                values[name] = self._given_values(name, counts, seed)
                _check_values(f"{KEY}.{name}", name, values[name])

        for name in ("server_up", "server_down"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise UserError(f"{KEY}.{name}", str(rate), "give a rate above 0")

        return values

    def _given_values(self, name: str, counts: Mapping[str, int], seed: int) -> np.ndarray:
        """Return one unit of all clients, (N,), as given for all of them and for groups."""
        clients = sum(counts.values())
        values = _draw(getattr(self, name), name, name, clients, seed)
        first = 0
        for position, (group, count) in enumerate(counts.items()):
            of_group = getattr(self.groups.get(group), name, None)
            if of_group is not None:
                # Drawn for all clients, so that a client's draw is the one at its number.
                drawn = _draw(of_group, name, f"{name} {position}", clients, seed)
                values[first : first + count] = drawn[first : first + count]
            first += count
        return values

    def _table_columns(self, clients: int) -> Mapping[str, np.ndarray]:
        """Return each column of the table, (N,), by its name; empty without a table."""
        if self.table is None:
            return {}

        key = f"{KEY}.table"
        table = _read_table(key, self.table, ["client"]).set_index("client")
        rows_of = table.index.value_counts().reindex(range(clients), fill_value=0)
        for client, rows in rows_of.items():
            if rows != 1:
                raise UserError(
                    key,
                    f"{rows} rows of client {client}",
                    f"give one for each of {clients}, from 0",
                )

        for name in table.columns:
            if name not in _UNITS:
                raise UserError(key, f"a column {[name]}", f"name columns {', '.join(_UNITS)}")

        table = table.loc[list(range(clients))]
        return {name: table[name].to_numpy(np.float64) for name in table.columns}


def seconds(rates: Mapping[str, np.ndarray], work: np.ndarray) -> np.ndarray:
    """Return the virtual seconds that work takes on devices, (C,).

    Args:
        rates: What each device does in a second, (C,) by name.
        work: (C, 3) bytes up, bytes down and FLOPs; (1, 3) if all clients do the same work.
    """
    up, down, flops = work.T
    messages = (work[:, :2] > 0).sum(axis=1) * rates["latency"]
    return down / rates["down"] + flops / rates["flops"] + up / rates["up"] + messages


def _draw(number: Number | None, name: str, purpose: str, clients: int, seed: int) -> np.ndarray:
    """Return a unit of all clients, (N,): drawn, the same for all, or such that it takes no time.

    Args:
        number: As given by the user.
        name: Of the unit.
        purpose: Names the draws.
        clients: Number of clients.
        seed: Of the run.
    """
    if isinstance(number, Distribution):
        return number.draw(numpy_generator(seed, f"device {purpose}"), clients)
    if number is None:
        number = 0.0 if name in _MAY_BE_ZERO else math.inf
    return np.full(clients, number, dtype=np.float64)


def _check_values(key: str, name: str, values: np.ndarray) -> None:
    """Refuse a unit of a client that is not positive; latency and energy can be 0."""
    if name in _MAY_BE_ZERO:
        fits = values >= 0
        fix = "give 0 or more"
    else:
        fits = values > 0
        fix = "give more than 0"

    wrong = np.flatnonzero(~fits)  # NaN is wrong too
    if len(wrong):
        raise UserError(key, f"{values[wrong[:1]]} as {name} of client {wrong[:1]}", fix)


def _check_probability(name: str, value: float) -> None:
    """Refuse a probability outside of (0, 1]."""
    if not 0 < value <= 1:
        key = f"{KEY}.availability.init_args.{name}"
        raise UserError(key, str(value), "give a probability above 0 and at most 1")


def _read_table(key: str, path: Path, columns: Sequence[str]) -> "pd.DataFrame":
    """Return a .csv file that has these columns, with NaN for what is no number.

    Raises:
        UserError: The file cannot be read, or lacks a column.
    """
    import pandas as pd

    fix = f"name a .csv file with the columns {', '.join(columns)}"
    try:
        table = pd.read_csv(path, skipinitialspace=True).apply(pd.to_numeric, errors="coerce")
    except (OSError, ValueError) as error:
        raise UserError(key, f"{path} cannot be read ({error})", fix) from error

    missing = [name for name in columns if name not in table]
    if missing:
        raise UserError(key, f"{path} has no column {', '.join(missing)}", fix)
    return table
