"""The devices of clients: what they do in a second, their memory, and when they are there.

A client's device is that of its row in a table, else of its group, else of all. What is not given
takes no time. Draws are named by (seed, purpose, round); a client's is the one at its number, so
that it depends neither on ranks nor on who takes part.
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
from lightfed.utils.errors import UserError, require
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
    """

    flops: Number | None = None
    up: Number | None = None
    down: Number | None = None
    latency: Number | None = None
    memory: Number | None = None


_UNITS = [unit.name for unit in fields(Device)]
_FREE = {name: 0.0 if name == "latency" else math.inf for name in _UNITS}


class Availability(Recorded, ABC):
    """Which clients may be asked to take part in a round."""

    @abstractmethod
    def there(self, before: np.ndarray, rng: Generator, now: float, t: int) -> np.ndarray:
        """(N,) how sure each client is there: those of more than 0 are, at `now` in round t.

        If nobody is, the server asks the client of the largest value. `before` (N,) bool were there
        in the last round that asked; `rng` is that of the round.
        """

    def next(self, now: float, among: np.ndarray) -> float:
        """Virtual seconds at which one of the clients among (N,) bool is there again."""
        return now


@dataclass(frozen=True)
class Bernoulli(Availability):
    """Every client is there with the same probability in every round."""

    share: float
    """The probability."""

    def __post_init__(self) -> None:
        _check_share("share", self.share)

    @override
    def there(self, before: np.ndarray, rng: Generator, now: float, t: int) -> np.ndarray:
        return self.share - rng.random(len(before))


@dataclass(frozen=True)
class OnOff(Availability):
    """A Markov chain of each client over rounds, which starts from its stationary state."""

    leave: float
    """Probability that a client that is there is gone in the next round."""
    come: float
    """Probability that a client that is gone is there in the next round."""

    def __post_init__(self) -> None:
        _check_share("leave", self.leave)
        _check_share("come", self.come)

    @override
    def there(self, before: np.ndarray, rng: Generator, now: float, t: int) -> np.ndarray:
        share = np.where(before, 1 - self.leave, self.come)
        if t == 0:
            share[:] = self.come / (self.come + self.leave)
        return share - rng.random(len(before))


@dataclass(frozen=True)
class Presence(Availability):
    """Intervals of virtual time in which clients are there, from a file."""

    path: Path
    """A .csv file with the columns client, from and to; a client may have several rows."""
    spans: np.ndarray = field(init=False, repr=False, compare=False)  # (rows, 3)

    def __post_init__(self) -> None:
        key, columns = f"{KEY}.availability.init_args.path", ["client", "from", "to"]
        spans = _read(key, self.path, columns)[columns].to_numpy(np.float64)
        clients, begin, end = spans.T
        wrong = np.flatnonzero(~((clients >= 0) & (begin < end)))  # also NaN
        found = f"row {wrong[:1].tolist()} is no interval of a client"
        require(not len(wrong), key, found, "give a client from 0, and from below to")
        order = np.lexsort((begin, clients))
        same = np.diff(clients[order]) == 0
        wrong = order[1:][same & (begin[order[1:]] < end[order[:-1]])]
        found = f"row {wrong[:1].tolist()} overlaps another of its client"
        require(not len(wrong), key, found, "give disjoint intervals")
        object.__setattr__(self, "spans", spans)

    @override
    def there(self, before: np.ndarray, rng: Generator, now: float, t: int) -> np.ndarray:
        found = np.zeros(len(before))
        clients, begin = self._after(now, len(before))
        found[clients[begin <= now]] = 1.0
        return found

    @override
    def next(self, now: float, among: np.ndarray) -> float:
        clients, begin = self._after(now, len(among))
        coming = begin[among[clients]]
        found, fix = f"nobody is there after {now:g} virtual seconds", "give later intervals"
        require(len(coming) > 0, f"{KEY}.availability.init_args.path", found, fix)
        return max(now, float(coming.min()))

    def _after(self, now: float, clients: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows,) clients and begins of the intervals that have not ended."""
        number, begin, end = self.spans.T
        lasts = (number < clients) & (end > now)
        return number[lasts].astype(np.int64), begin[lasts]


@dataclass(frozen=True)
class Devices(Device):
    """The devices of all clients; what is left out takes no time.

    Attributes:
        table: A .csv file with the column client and any of flops, up, down, latency and memory, in
            the same units; it has a row for every client.
        delay: Virtual seconds of a session, in addition, drawn for each.
        step_delay: Virtual seconds of a step of a session, or of what FedBCD's K counts, drawn for
            each session.
        server_up: Bytes per second that the server sends, which the clients of a round share.
        server_down: Bytes per second that it receives, likewise.
        availability: Which clients may take part in a round; all by default.
    """

    table: Path | None = None
    delay: Delay | None = None
    step_delay: Delay | None = None
    server_up: float | None = None
    server_down: float | None = None
    availability: Availability | None = None

    def of(
        self, groups: Sequence[tuple[int, Device | None]], *, seed: int
    ) -> dict[str, np.ndarray]:
        """(N,) each: flops, up, down, latency and memory of the clients.

        `groups` are their numbers and their own devices. A UserError if a number is not positive,
        or if the table does not fit.
        """
        ends = np.cumsum([0, *(count for count, _ in groups)]).tolist()
        columns, values = self._columns(ends[-1]), {}
        for name in _UNITS:
            own = _draw(getattr(self, name), name, name, ends[-1], seed)
            for group, (_, device) in enumerate(groups):
                if (given := getattr(device, name, None)) is not None:
                    part = slice(*ends[group : group + 2])
                    own[part] = _draw(given, name, f"{name} {group}", ends[-1], seed)[part]
            values[name] = columns.get(name, own)
            key, may = f"{KEY}.{'table' if name in columns else name}", name == "latency"  # be 0
            wrong = ~((values[name] >= 0) if may else (values[name] > 0))  # also NaN
            found = f"{values[name][wrong][:1]} as {name} of client {np.flatnonzero(wrong)[:1]}"
            require(not wrong.any(), key, found, f"give {'0 or more' if may else 'more than 0'}")
        for name in ("server_up", "server_down"):
            rate = getattr(self, name)
            require(rate is None or rate > 0, f"{KEY}.{name}", rate, "give a rate above 0")
        return values

    def _columns(self, clients: int) -> Mapping[str, np.ndarray]:
        """(N,) each column of the table, by its name."""
        if self.table is None:
            return {}
        key = f"{KEY}.table"
        table = _read(key, self.table, ["client"]).set_index("client")
        rows = table.index.value_counts().reindex(range(clients), fill_value=0)
        wrong = [f"{n} rows of client {k}" for k, n in rows.items() if n != 1]
        require(not wrong, key, ", ".join(wrong[:1]), f"give one for each of {clients}, from 0")
        unknown = [name for name in table.columns if name not in _UNITS]
        require(not unknown, key, f"a column {unknown[:1]}", f"name columns {', '.join(_UNITS)}")
        table = table.loc[[*range(clients)]]
        return {name: table[name].to_numpy(np.float64) for name in table.columns}


def seconds(rates: Mapping[str, np.ndarray], work: np.ndarray) -> np.ndarray:
    """(C,) virtual seconds of (C, 3) bytes up, bytes down and FLOPs on devices of these rates.

    Work of (1, 3) is that of each.
    """
    up, down, flops = work.T
    messages = (work[:, :2] > 0).sum(axis=1) * rates["latency"]
    return down / rates["down"] + flops / rates["flops"] + up / rates["up"] + messages


def _draw(given: Number | None, name: str, purpose: str, clients: int, seed: int) -> np.ndarray:
    if isinstance(given, Distribution):
        return given.draw(numpy_generator(seed, f"device {purpose}"), clients)
    return np.full(clients, _FREE[name] if given is None else given, dtype=np.float64)


def _check_share(name: str, value: float) -> None:
    key = f"{KEY}.availability.init_args.{name}"
    require(0 < value <= 1, key, value, "give a probability above 0 and at most 1")


def _read(key: str, path: Path, columns: Sequence[str]) -> "pd.DataFrame":
    """A .csv file that has these columns, NaN for what is no number."""
    import pandas as pd

    fix = f"name a .csv file with the columns {', '.join(columns)}"
    try:
        table = pd.read_csv(path, skipinitialspace=True).apply(pd.to_numeric, errors="coerce")
    except (OSError, ValueError) as error:
        raise UserError(key, f"{path} cannot be read ({error})", fix) from error
    lacking = [name for name in columns if name not in table]
    require(not lacking, key, f"{path} has no column {', '.join(lacking)}", fix)
    return table
