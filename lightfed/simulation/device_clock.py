"""Virtual time of clients with devices: what the ledger counts, in seconds.

A client that does a round's work receives, computes and sends, one after the other:

    bytes down / down + latency  +  FLOPs / flops  +  bytes up / up + latency

and its session's delay. This is APPFL's formula, with the bytes and FLOPs of each client's own
model. All start when the last round ended, and the server merges when all have sent, or when the
policy says so; what clients do after the merge follows it. Without a server a client starts when it
and the neighbours that it receives from have done their last round. The clients of a round share
the server's link equally, as long as any of them is there.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightfed.simulation.clock import device_delays
from lightfed.simulation.devices import KEY as DEVICES
from lightfed.simulation.devices import Devices, seconds
from lightfed.simulation.policy import KEY, Policy
from lightfed.state.costs import Ledger
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator

_OFF = -1


class DeviceClock:
    """The virtual clock of a fleet; the same on every rank.

    Args:
        devices: of the clients.
        values: (N,) each, what the devices do in a second and their memory, by name.
        ledger: bytes and FLOPs of all clients.
        sampled: clients of a round.
        policy: of the server.
        seed: of the run.

    Attributes:
        now: virtual seconds since the start; the end of the last round.
        arrived: in this round, rounds that kept updates come late, by client.
        late: the clients of this round whose updates do not count in it.
    """

    def __init__(
        self,
        devices: Devices,
        values: Mapping[str, np.ndarray],
        ledger: Ledger,
        *,
        sampled: int,
        policy: Policy | None = None,
        seed: int = 0,
    ) -> None:
        self.devices, self.policy, self.seed = devices, policy or Policy(), seed
        self.values = values
        self._ledger, self._sampled = ledger, sampled
        self.now, clients = 0.0, ledger.clients
        self._finish = np.zeros(clients)  # of the last work of each client
        self._busy = np.zeros(clients)  # seconds at work since the start
        self._began = np.full(clients, _OFF)  # round of a kept update that has not arrived
        self._there = np.ones(clients, dtype=bool)  # in the last round that asked
        self._known = np.zeros((clients, 3))  # of the ledger's totals, what has a price
        self._worked = np.zeros(clients)  # seconds in this round
        self._t = 0
        self.open()

    def state_dict(self) -> dict[str, Any]:
        """What survives a round."""
        arrays = self._finish, self._busy, self._began, self._there
        return {"now": self.now, "arrays": [torch.from_numpy(each.copy()) for each in arrays]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.now = state["now"]
        arrays = (each.numpy().copy() for each in state["arrays"])
        self._finish, self._busy, self._began, self._there = arrays
        self._known[:] = self._ledger.totals

    def open(self) -> None:
        """Begin a round."""
        self._start = self.now
        self._begin: np.ndarray | None = None  # (N,) if clients start at different times
        self._ledger.touched, self._workers = [], list[np.ndarray]()
        self._trained: dict[int, int] = {}  # steps of this round's sessions, by client
        self._asked: list[int] | None = None
        self._closed = self._own = False
        self.arrived: dict[int, int] = {}
        self.late: set[int] = set()

    def participants(self, t: int) -> list[int]:
        """S_t: clients that are there and have nothing to finish, drawn without replacement.

        If nobody is there, the server waits for the first.
        """
        if self._asked is None:
            self._asked = self._draw(t)
        return self._asked

    @property
    def selects(self) -> bool:
        """Whether clients may be away, or busy with an earlier round."""
        return self.devices.availability is not None or not self.policy.waits

    def _draw(self, t: int) -> list[int]:
        rule, kept = self.devices.availability, self.under_way
        finish = np.delete(self._finish, kept) if kept else self._finish
        start = max(self.now, float(finish.min()))
        asked = free = self._finish <= start
        free[kept] = False
        if rule is not None:
            start = rule.next(start, free)
            sure = rule.there(self._there, now=start, t=t, seed=self.seed)
            self._there = sure > 0
            asked = free & self._there
            if not asked.any():
                asked = free & (sure == sure[free].max())
        self.now = self._start = start
        clients, count = np.flatnonzero(asked), self.policy.selected(self._sampled)
        if count < len(clients):
            rng = numpy_generator(self.seed, "participants", t)
            drawn = rng.choice(len(clients), count, replace=False, shuffle=False)
            clients = clients[np.sort(drawn)]
        found: list[int] = clients.tolist()
        return found

    def meet(self, senders: Mapping[int, Sequence[int]]) -> None:
        """Clients start when they and those that they receive from have done their last round."""
        self._begin = self._finish.copy()
        for client, theirs in senders.items():
            self._begin[client] = self._finish[[client, *theirs]].max()

    def trained(self, steps: Mapping[int, int], t: int) -> None:
        """Note the steps of sessions, by client."""
        self._trained |= steps
        self._t = t

    @property
    def under_way(self) -> list[int]:
        """Clients whose updates are kept until they arrive, ascending."""
        found: list[int] = np.flatnonzero(self._began != _OFF).tolist()
        return found

    def close(self, silent: Collection[int], usable: Mapping[int, bool]) -> None:
        """End the server's wait, at the first merge of a round.

        `silent` clients have left without a message; an update that is not `usable` counts in no
        round. A UserError if not even the fastest client could meet the deadline.
        """
        if self._closed or self._own:
            return
        self._closed = True
        who, work = self._work()
        begin = self._finish[who] if self._begin is None else self._begin[who]
        least = self._start if self._begin is None else 0.0
        self._finish[who] = np.maximum(begin, least) + self._spend(who, self._price(who, work))
        trained = np.fromiter(self._trained, dtype=np.int64, count=len(self._trained))
        if self.devices.delay is not None or self.devices.step_delay is not None:
            delays = self._delays(trained, self._t, self._trained, "delay")
            self._finish[trained] += self._spend(trained, delays)
        sent = trained[[k not in silent for k in self._trained]] if silent else trained
        if self.policy.waits or not (len(sent) or self.under_way):
            last = sent if len(sent) else who
            self.now = float(self._finish[last].max(initial=self.now))
            return
        under_way = _union([sent, np.flatnonzero(self._began != _OFF)])
        self.now = self._closing_time(np.sort(self._finish[under_way]))
        if self.policy.late == "drop" and self.now < self._finish[under_way].min():
            self._check_deadline(work[np.isin(who, sent)])
        in_time = self._finish[under_way] <= self.now
        self.late = {*sent.tolist()} - {*under_way[in_time].tolist()}
        for client in under_way[in_time & (self._began[under_way] != _OFF)].tolist():
            self.arrived[client] = self._t - int(self._began[client])
        self._began[[*self.arrived]] = _OFF
        if self.policy.late == "keep":
            self._began[[k for k in self.late if usable[k]]] = self._t

    def _closing_time(self, finish: np.ndarray) -> float:
        """When the server merges, of the sorted times of all updates under way."""
        policy = self.policy
        end = float(finish[policy.enough(self._sampled, len(finish)) - 1])
        if end < finish[-1]:
            end = min(end + policy.grace, float(finish[-1]))
        if policy.deadline is not None:
            end = min(end, self._start + policy.deadline)
        # an update that is kept is merged before its client starts again: somebody has to arrive
        least = float(finish[0]) if policy.late == "keep" else self._start
        return max(end, least, self._start)

    def _check_deadline(self, work: np.ndarray) -> None:
        """Refuse a deadline that no client would meet with the least work of this round's."""
        deadline, everyone = self.policy.deadline, np.arange(len(self._busy))
        least = self._price(everyone, np.tile(work.min(axis=0), (len(everyone), 1))).min()
        found = f"{deadline:g} virtual seconds, and the fastest client needs {least:.4g}"
        require(deadline is None or least <= deadline, f"{KEY}.deadline", found, "give more")

    def _work(self) -> tuple[np.ndarray, np.ndarray]:
        """(C,) clients that have worked since the last call, ascending, and (C, 3) their work."""
        touched, self._ledger.touched = self._ledger.touched, []
        who = _union(touched or ())
        total = self._ledger.totals[who]
        work, self._known[who] = total - self._known[who], total
        return who, work

    def _price(self, who: np.ndarray, work: np.ndarray) -> np.ndarray:
        """(C,) seconds of clients for (C, 3) bytes up, bytes down and FLOPs."""
        rates = {name: self.values[name][who] for name in ("up", "down", "flops", "latency")}
        links = (
            ("up", Ledger.UP, self.devices.server_down),
            ("down", Ledger.DOWN, self.devices.server_up),
        )
        for name, column, server in links:
            if server is not None:
                share = server / max(1, int(np.count_nonzero(work[:, column])))
                rates[name] = np.minimum(rates[name], share)
        return seconds(rates, work)

    def _delays(
        self, who: np.ndarray, t: int, steps: Mapping[int, int], purpose: str
    ) -> np.ndarray:
        """(C,) seconds of the sessions' delays in round t; their draws have names."""
        delays, clients, given = np.zeros(len(who)), who.tolist(), self.devices
        named = {"seed": self.seed, "t": t}
        if given.delay is not None:
            delays = device_delays(given.delay, clients, **named, purpose=purpose)
        if given.step_delay is not None:
            each = device_delays(given.step_delay, clients, **named, purpose=f"step-{purpose}")
            delays = delays + each * np.array([steps[k] for k in clients])
        return delays

    def _spend(self, who: np.ndarray, spent: np.ndarray) -> np.ndarray:
        self._busy[who] += spent
        self._worked[who] += spent
        self._workers.append(who)
        return spent

    def session_seconds(
        self, clients: Sequence[int], t: int, *, up: float | Sequence[float], purpose: str | None
    ) -> np.ndarray:
        """(C,) virtual seconds of sessions, for a method that then sets `now` by a rule of its own.

        They are those of what clients have received and computed since the last call, and of what
        they send: `up` bytes, each or by client. `purpose` names the draws of delays; without it
        there are none.
        """
        self._own = True
        who = np.array(clients, dtype=np.int64)
        work = self._ledger.totals[who] - self._known[who]
        self._known[who] = self._ledger.totals[who]
        work[:, Ledger.UP] = up
        spent = self._price(who, work)
        if purpose is not None:
            spent = spent + self._delays(who, t, self._trained, purpose)
        return self._spend(who, spent)

    def close_round(self, silent: Collection[int], usable: Mapping[int, bool]) -> dict[str, float]:
        """End a round; its metrics. As of `close`."""
        idle = self._asked is None and self.devices.availability is not None
        found = "given, and the method trains all clients in every round"
        require(not idle, f"{DEVICES}.availability", found, "leave it out")
        if not self._own:
            self.close(silent, usable)
        who, work = self._work()
        if len(who) and not self._own:
            self._after_the_merge(who, work)
        workers = _union(self._workers)
        worked = self._worked[workers]
        self._worked[workers] = 0.0
        waits = np.maximum(self.now - self._start - worked, 0.0)
        found_late = {} if self.policy.waits else {"late": float(len(self.late))}
        return {
            "virtual_time": self.now,
            "busy_time": float(worked.mean()) if len(worked) else 0.0,
            "idle_time": float(waits.mean()) if len(worked) else 0.0,
        } | found_late

    def _after_the_merge(self, who: np.ndarray, work: np.ndarray) -> None:
        late = np.isin(who, [*self.late])
        begin = np.where(late, self._finish[who], np.maximum(self._finish[who], self.now))
        self._finish[who] = begin + self._spend(who, self._price(who, work))
        self.now = float(self._finish[who[~late]].max(initial=self.now))

    def times(self) -> np.ndarray:
        """(N, 2) virtual seconds of each client since the start: at work, and idle."""
        return np.stack([self._busy, np.maximum(self.now - self._busy, 0.0)], axis=1)


def _union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """(C,) int64: all clients of the parts, ascending."""
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
