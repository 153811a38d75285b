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

from lightfed.devices.devices import KEY as DEVICES
from lightfed.devices.devices import Devices, seconds
from lightfed.devices.policy import KEY, Policy
from lightfed.state.costs import Ledger
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator

Clients = np.ndarray | Sequence[int]


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
        self.values, self._ledger, self._sampled = values, ledger, sampled
        self.now, clients = 0.0, ledger.clients
        self._finish = np.zeros(clients)  # of the last work of each client
        self._busy = np.zeros(clients)  # seconds at work, of ended rounds
        self._there = np.ones(clients, dtype=bool)  # in the last round that asked
        self._began: dict[int, int] = {}  # of kept updates that have not arrived, by client
        self._known = np.zeros((clients, 3))  # of the ledger's totals, what has a price
        self.open()

    def state_dict(self) -> dict[str, Any]:
        """What survives a round."""
        arrays = self._finish, self._busy, self._there
        copies = [torch.from_numpy(each.copy()) for each in arrays]
        return {"now": self.now, "began": {**self._began}, "arrays": copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.now, self._began = state["now"], {**state["began"]}
        self._finish, self._busy, self._there = (each.numpy().copy() for each in state["arrays"])
        self._known[:] = self._ledger.totals

    def open(self) -> None:
        """Begin a round."""
        self._start = self._least = self.now  # of the round, and of its work
        self._ledger.touched, self._worked = [], np.zeros(self._ledger.clients)
        self._t = 0
        self._steps: dict[int, int] = {}  # of this round's sessions, by client
        self._asked: list[int] | None = None
        self._closed = self._own = False
        self.arrived: dict[int, int] = {}
        self.late: set[int] = set()

    def participants(self, t: int) -> list[int]:
        """S_t: clients that are there and have nothing to finish, drawn without replacement.

        If nobody is there, the server waits for the first.
        """
        if self._asked is not None:
            return self._asked
        rng, rule = numpy_generator(self.seed, "participants", t), self.devices.availability
        ready = self._finish.copy()
        ready[self.under_way] = np.inf
        start = max(self.now, float(ready.min()))
        asked = free = ready <= start
        if rule is not None:
            start = rule.next(start, free)
            sure = rule.there(self._there, rng, start, t)
            self._there = sure > 0
            asked = free & self._there
            if not asked.any():
                asked = free & (sure == sure[free].max())
        self.now = self._start = self._least = start
        clients, count = np.flatnonzero(asked), self.policy.selected(self._sampled)
        if count < len(clients):
            clients = np.sort(rng.choice(clients, count, replace=False, shuffle=False))
        self._asked = [*clients.tolist()]
        return self._asked

    @property
    def selects(self) -> bool:
        """Whether clients may be away, or busy with an earlier round."""
        return self.devices.availability is not None or not self.policy.waits

    def meet(self, senders: Mapping[int, Sequence[int]]) -> None:
        """Clients start when they and those that they receive from have done their last round."""
        finish, self._least = self._finish.copy(), 0.0
        for client, theirs in senders.items():
            self._finish[client] = finish[[client, *theirs]].max()

    def trained(self, steps: Mapping[int, int], t: int) -> None:
        """Note the steps of sessions, by client."""
        self._steps |= steps
        self._t = t

    @property
    def under_way(self) -> list[int]:
        """Clients whose updates are kept until they arrive, ascending."""
        return sorted(self._began)

    def close(self, silent: Collection[int], usable: Mapping[int, bool]) -> None:
        """End the server's wait, at the first merge of a round.

        `silent` clients have left without a message; an update that is not `usable` counts in no
        round. A UserError if not even the fastest client could meet the deadline.
        """
        if self._closed:
            return
        self._closed = True
        trained = [*self._steps]
        who, work = self._work(trained)
        self._finish[who] = np.maximum(self._finish[who], self._least) + self._price(who, work)
        self._finish[trained] += self._delays(trained, "delay")
        sent = [k for k in trained if k not in silent]
        coming = [*sent, *self._began]
        finish = self._finish[coming or who]
        if self.policy.waits or not coming:
            self.now = float(finish.max(initial=self.now))
            return
        self.now = self._closing_time(np.sort(finish))
        if self.policy.late == "drop" and self.now < finish.min():
            self._check_deadline(work[np.isin(who, sent)])
        out = {k for k, end in zip(coming, finish.tolist(), strict=True) if end > self.now}
        self.late = out.intersection(sent)
        self.arrived = {k: self._t - t for k, t in self._began.items() if k not in out}
        for client in self.arrived:
            del self._began[client]
        if self.policy.late == "keep":
            self._began |= {k: self._t for k in self.late if usable[k]}

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
        deadline = self.policy.deadline
        fastest = seconds(self.values, work.min(axis=0, keepdims=True)).min()
        found = f"{deadline:g} virtual seconds, and the fastest client needs {fastest:.4g}"
        require(deadline is None or fastest <= deadline, f"{KEY}.deadline", found, "give more")

    def _work(self, trained: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """(C,) clients, with those `trained`, and (C, 3) their work since the last call."""
        worked = np.zeros(self._ledger.clients, dtype=bool)
        for clients in (trained, *(self._ledger.touched or ())):
            worked[clients] = True
        who, self._ledger.touched = np.flatnonzero(worked), []
        return who, self._since(who)

    def _since(self, who: Clients) -> np.ndarray:
        """(C, 3) bytes up, bytes down and FLOPs of clients since the last call."""
        total = self._ledger.totals[who]
        work, self._known[who] = total - self._known[who], total
        return work

    def _price(self, who: Clients, work: np.ndarray) -> np.ndarray:
        """(C,) seconds at work of clients for (C, 3) bytes up, bytes down and FLOPs."""
        rates = {name: values[who] for name, values in self.values.items()}
        for name, column, server in (
            ("up", Ledger.UP, self.devices.server_down),
            ("down", Ledger.DOWN, self.devices.server_up),
        ):
            if server is not None:
                share = server / max(1, int(np.count_nonzero(work[:, column])))
                rates[name] = np.minimum(rates[name], share)
        spent = seconds(rates, work)
        self._worked[who] += spent
        return spent

    def _delays(self, who: Sequence[int], purpose: str) -> np.ndarray:
        """(C,) seconds of the delays of this round's sessions, also at work."""
        delays, given = np.zeros(len(who)), self.devices
        if given.delay is not None:
            rng = numpy_generator(self.seed, purpose, self._t)
            delays += given.delay.draw(rng, len(self._busy))[who]
        if given.step_delay is not None:
            rng = numpy_generator(self.seed, f"step-{purpose}", self._t)
            steps = np.array([self._steps[k] for k in who])
            delays += steps * given.step_delay.draw(rng, len(self._busy))[who]
        self._worked[who] += delays
        return delays

    def session_seconds(
        self, clients: Sequence[int], *, up: float | Sequence[float], purpose: str | None
    ) -> np.ndarray:
        """(C,) virtual seconds of sessions, for a method that then sets `now` by a rule of its own.

        They are those of what clients have received and computed since the last call, and of what
        they send: `up` bytes, each or by client. `purpose` names the draws of delays; without it
        there are none.
        """
        self._closed = self._own = True
        work = self._since(clients)
        work[:, Ledger.UP] = up
        spent = self._price(clients, work)
        return spent if purpose is None else spent + self._delays(clients, purpose)

    def close_round(self, silent: Collection[int], usable: Mapping[int, bool]) -> dict[str, float]:
        """End a round; its metrics. As of `close`."""
        idle = self._asked is None and self.devices.availability is not None
        found = "given, and the method trains all clients in every round"
        require(not idle, f"{DEVICES}.availability", found, "leave it out")
        self.close(silent, usable)
        if self._ledger.touched:
            self._after_the_merge()
        self._busy += self._worked
        worked = self._worked[np.flatnonzero(self._worked > 0)]
        waits, count = np.maximum(self.now - self._start - worked, 0.0), max(1, len(worked))
        return {
            "virtual_time": self.now,
            "busy_time": float(worked.sum()) / count,
            "idle_time": float(waits.sum()) / count,
        } | ({} if self.policy.waits else {"late": float(len(self.late))})

    def _after_the_merge(self) -> None:
        """The server also waits for what its clients do now, except for late ones."""
        who, work = self._work()
        if self._own:
            return
        waited = who[self._finish[who] <= self.now]
        self._finish[who] = np.maximum(self._finish[who], self.now) + self._price(who, work)
        self.now = float(self._finish[waited].max(initial=self.now))

    def times(self) -> np.ndarray:
        """(N, 2) virtual seconds of each client since the start: at work, and idle."""
        return np.stack([self._busy, np.maximum(self.now - self._busy, 0.0)], axis=1)
