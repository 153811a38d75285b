"""Virtual time of clients with devices: what the ledger counts, in seconds.

A client that does a round's work receives, computes and sends, one after the other:

    bytes down / down + latency  +  FLOPs / flops  +  bytes up / up + latency

To this its session's delay is added. The bytes and FLOPs are those of the client's own model. Its
device spends `joules_per_flop` on each of these FLOPs and `joules_per_byte` on each of the bytes,
also for work that comes to nothing.

With a server, all clients start when the last round has ended. The server merges when all of them
have sent, or when the policy says so; what clients do after the merge follows it. Without a server,
a client starts when it and the neighbors that it receives from have done their last round. The
clients of a round share the server's link equally, for as long as any of them uses it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from lightfed.api.clock import Clock
from lightfed.devices.devices import KEY as DEVICES
from lightfed.devices.devices import Devices, seconds
from lightfed.devices.policy import KEY as POLICY
from lightfed.devices.policy import LearnedDeadline, Policy
from lightfed.state.costs import Ledger
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

Clients = np.ndarray | Sequence[int]


class DeviceClock(Clock):
    """The virtual clock of a fleet; the same on every rank.

    Args:
        devices: The clients' devices.
        values: What the devices do in a second and their memory, (N,) each, by name.
        ledger: Counts the bytes and FLOPs of all clients.
        sampled: Number of clients in a round.
        policy: What the server waits for; all clients by default.
        seed: Of the run.
        seen: The clients that can take part, ascending; all by default.

    Attributes:
        finish: When each client has finished its last work, in virtual seconds, (N,).
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
        seen: Sequence[int] | None = None,
    ) -> None:
        clients = ledger.clients
        super().__init__(sampled, clients, seed, seen)
        self._is_unseen = np.ones(clients, dtype=bool)
        self._is_unseen[list(self.seen)] = False
        self.devices = devices
        self.policy = policy or Policy()
        self.values = values
        self.keeps_late = self.policy.late == "keep"
        self.drops_late = self.policy.drops_late
        self.loses_partial = self.policy.partial == "lose"
        self.delays_steps = devices.step_delay is not None
        self._ledger = ledger

        self.finish = np.zeros(clients)

        # Each client's seconds at work in the rounds that have ended.
        self._busy = np.zeros(clients)

        # Which clients were available in the last round that asked for it.
        self._were_there = np.ones(clients, dtype=bool)

        # For kept updates that have not arrived, by client: the round in which each began, and when
        # it arrives, in virtual seconds. The client may work on after it has sent its update.
        self._round_begun: dict[int, int] = {}
        self._arrival: dict[int, float] = {}

        # Virtual seconds that a round may take; None for no limit. A learned one begins without.
        self._deadline: float | None = None
        if not isinstance(self.policy.deadline, LearnedDeadline):
            self._deadline = self.policy.deadline

        # For a learned deadline, the sessions whose updates have not arrived: when each update will
        # arrive, and how long its session takes, both in virtual seconds.
        self._unmeasured: list[tuple[float, float]] = []

        # The part of the ledger's totals that has been turned into time already.
        self._counted_bytes = np.zeros_like(ledger.bytes)
        self._counted_flops = np.zeros(clients)
        self._spends = bool(values["joules_per_flop"].any() or values["joules_per_byte"].any())
        self._joules_before = np.zeros(clients)  # what each client had spent before this round
        self.open()

    @override
    def state_dict(self) -> dict[str, Any]:
        arrays = []
        for values in (self.finish, self._busy, self._were_there):
            arrays.append(torch.from_numpy(values.copy()))
        state: dict[str, Any] = {"now": self.now, "began": dict(self._round_begun)}
        state["arrays"] = arrays
        if self.keeps_late:
            state["arrival"] = dict(self._arrival)
        if self._learns:
            state["deadline"] = self._deadline
            state["unmeasured"] = list(self._unmeasured)
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        assert state is not None, "a run without devices has no time to go on from"
        finish, busy, were_there = state["arrays"]
        self.now = state["now"]
        self._round_begun = dict(state["began"])
        self.finish = finish.numpy().copy()
        self._busy = busy.numpy().copy()
        self._were_there = were_there.numpy().copy()
        if self.keeps_late:
            self._arrival = dict(state["arrival"])
        if self._learns:
            self._deadline = state["deadline"]
            self._unmeasured = list(state["unmeasured"])

        # The ledger is restored first: all that it has is of rounds that have ended.
        self._counted_bytes[:] = self._ledger.bytes
        self._counted_flops[:] = self._ledger.flops
        joules = self.joules()
        if joules is not None:
            self._joules_before = joules

    @property
    def _learns(self) -> bool:
        """Whether the deadline follows the arrivals of earlier rounds."""
        return isinstance(self.policy.deadline, LearnedDeadline)

    @override
    def open(self) -> None:
        self._round_start = self.now
        self._earliest_work = self.now  # before this no client works in this round
        self._worked = np.zeros(self._ledger.clients)  # seconds of this round
        self._ledger.touched = []
        self._t = 0
        self._steps: dict[int, int] = {}  # of this round's sessions, by client
        self._selected: list[int] | None = None
        self._is_closed = False
        self._method_sets_time = False
        self._next_deadline = self._deadline
        self.arrived = {}
        self.begun = {}
        self.late = set()

    @override
    def participants(self, t: int) -> list[int]:
        """Return S_t: clients that are available and idle, drawn without replacement.

        If no client is, the server waits for the first one.
        """
        if self.devices.availability is None and self.policy.waits:
            return super().participants(t)  # nobody is ever away or busy
        if self._selected is not None:
            return self._selected

        rng = numpy_generator(self.seed, "participants", t)

        # A client whose update is still under way cannot be asked before that has been merged.
        free_at = self.finish.copy()
        free_at[self.under_way] = np.inf
        free_at[self._is_unseen] = np.inf
        start = max(self.now, float(free_at.min()))
        is_free = free_at <= start

        candidates = is_free
        availability = self.devices.availability
        if availability is not None:
            start = availability.next(start, is_free)
            likelihood = availability.there(self._were_there, rng, start, t)
            self._were_there = likelihood > 0
            candidates = is_free & self._were_there
            if not candidates.any():
                candidates = is_free & (likelihood == likelihood[is_free].max())

        self.now = start
        self._round_start = start
        self._earliest_work = start

        clients = np.flatnonzero(candidates)
        count = self.policy.selected(self.sampled)
        if count < len(clients):
            clients = np.sort(rng.choice(clients, count, replace=False, shuffle=False))
        self._selected = clients.tolist()
        return self._selected

    @override
    def leaving(self, clients: Sequence[int], t: int) -> dict[int, float]:
        return self.policy.leaving(clients, of=self.clients, t=t, seed=self.seed)

    @override
    def step_seconds(
        self, clients: Sequence[int], flops: Sequence[float], t: int | None = None
    ) -> np.ndarray:
        of_each = np.asarray(flops, dtype=np.float64) / self.values["flops"][list(clients)]
        step_delay = self.devices.step_delay
        if step_delay is not None and t is not None:
            # The draws of the sessions of this round, which `_draw_delays` makes again.
            rng = numpy_generator(self.seed, "step-delay", t)
            of_each += step_delay.draw(rng, self.clients)[list(clients)]
        return of_each

    @override
    def meet(self, senders: Mapping[int, Sequence[int]]) -> None:
        """Let clients start when they and their senders have done their last round."""
        last_finish = self.finish.copy()
        for client, its_senders in senders.items():
            self.finish[client] = last_finish[[client, *its_senders]].max()

        # There is no server whose round they wait for.
        self._earliest_work = 0.0

    @override
    def trained(self, steps: Mapping[int, int], t: int) -> None:
        self._steps |= steps
        self._t = t

    @property
    @override
    def under_way(self) -> list[int]:
        return sorted(self._round_begun)

    @override
    def close(self, silent: Collection[int], usable: Mapping[int, bool]) -> None:
        """End the server's wait, at the first merge of a round.

        Raises:
            UserError: Not even the fastest client could meet the deadline.
        """
        if self._is_closed:
            return
        self._is_closed = True

        trained = list(self._steps)
        workers, work = self._new_work(trained)
        begin = np.maximum(self.finish[workers], self._earliest_work)
        self.finish[workers] = begin + self._spend(workers, work)
        self.finish[trained] += self._draw_delays(trained, "delay")

        sent = [client for client in trained if client not in silent]
        arrivals = dict(zip(sent, self.finish[sent].tolist(), strict=True)) | self._arrival
        if not arrivals:
            # Nobody has sent an update: the round lasts as long as its work.
            self.now = float(self.finish[workers].max(initial=self.now))
            return

        in_order = np.sort([*arrivals.values()])
        if self.policy.waits:
            self.now = float(in_order.max(initial=self.now))
            return

        self.now = self._closing_time(in_order)
        if self.policy.late == "drop" and self.now < in_order[0]:
            self._check_deadline(work[np.isin(workers, sent)])
        self._note_late_updates(arrivals, sent, usable)
        self._measure_arrivals(sent)

    def _measure_arrivals(self, sent: Sequence[int]) -> None:
        """Let a learned deadline follow the updates that have arrived by the end of the wait.

        Args:
            sent: Clients that send an update of this round.
        """
        learned = self.policy.deadline
        if not isinstance(learned, LearnedDeadline):
            return

        for arrival in self.finish[sent].tolist():
            self._unmeasured.append((arrival, arrival - self._round_start))

        durations = []
        still_coming = []
        for arrival, duration in self._unmeasured:
            if arrival <= self.now:
                durations.append(duration)
            else:
                still_coming.append((arrival, duration))
        self._unmeasured = still_coming
        self._next_deadline = learned.after(self._deadline, durations)

    def _note_late_updates(
        self, arrivals: Mapping[int, float], sent: Collection[int], usable: Mapping[int, bool]
    ) -> None:
        """Note whose update comes too late for this round, and whose late update has arrived.

        Args:
            arrivals: When each update under way arrives, of this round or an earlier one.
            sent: Clients with an update of this round.
            usable: By client, whether its update can count in any round.
        """
        missed = {client for client, arrival in arrivals.items() if arrival > self.now}
        self.late = missed.intersection(sent)

        self.begun = {}
        for client, round_begun in self._round_begun.items():
            if client not in missed:
                self.begun[client] = round_begun
        self.arrived = {client: self._t - begun for client, begun in self.begun.items()}
        for client in self.arrived:
            del self._round_begun[client]
            del self._arrival[client]

        if self.policy.late == "keep":
            for client in self.late:
                # `lightfed plan` runs no sessions, and does not know which ones fail.
                if usable.get(client, True):
                    self._round_begun[client] = self._t
                    self._arrival[client] = arrivals[client]

    def _closing_time(self, finish: np.ndarray) -> float:
        """Return when the server merges, in virtual seconds.

        Args:
            finish: When each update under way arrives, ascending.
        """
        policy = self.policy
        last = float(finish[-1])
        end = float(finish[policy.enough(self.sampled, len(finish)) - 1])
        if end < last:
            end = min(end + policy.grace, last)
        if self._deadline is not None:
            end = min(end, self._round_start + self._deadline)

        # A kept update is merged before its client starts again. So somebody has to arrive, or
        # there would soon be no client left to ask. A learned deadline may have become too short
        # for the clients of this round, which its user cannot mend.
        needs_one = policy.late == "keep" or self._learns
        earliest = float(finish[0]) if needs_one else self._round_start
        return max(end, earliest, self._round_start)

    def _check_deadline(self, work: np.ndarray) -> None:
        """Refuse a deadline that no client would meet even with the least work of this round.

        Args:
            work: (C, 3) bytes up, bytes down and FLOPs of those who have sent.
        """
        least = work.min(axis=0, keepdims=True)
        fastest = seconds(self.values, least).min()
        deadline = self._deadline
        if deadline is not None and fastest > deadline:
            raise UserError(
                f"{POLICY}.deadline",
                f"{deadline:g} virtual seconds, but the fastest client needs {fastest:.4g}",
                "give more",
            )

    def _new_work(self, trained: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return who has worked since the last call, and what they have done.

        Args:
            trained: Clients to include even if they have neither received nor sent.

        Returns:
            The clients, (C,) ascending, and their bytes up, bytes down and FLOPs, (C, 3).
        """
        has_worked = np.zeros(self._ledger.clients, dtype=bool)
        has_worked[list(trained)] = True  # a list: an empty tuple would select everybody
        for clients in self._ledger.touched or ():
            has_worked[clients] = True
        self._ledger.touched = []

        workers = np.flatnonzero(has_worked)
        return workers, self._take_work(workers)

    def _take_work(self, clients: Clients) -> np.ndarray:
        """Return what clients have done since the last call: (C, 3), as `_new_work` gives it."""
        sent = self._ledger.bytes[clients]
        flops = self._ledger.flops[clients]

        # The bytes are whole numbers: beyond 2^53 a difference of floats would lose some.
        new_bytes = sent - self._counted_bytes[clients]
        new_flops = flops - self._counted_flops[clients]
        self._counted_bytes[clients] = sent
        self._counted_flops[clients] = flops
        return np.column_stack([new_bytes, new_flops])

    def _spend(self, clients: Clients, work: np.ndarray) -> np.ndarray:
        """Return the seconds of some clients' work, (C,), and count them as work of this round.

        Args:
            clients: Numbers of the clients.
            work: (C, 3) bytes up, bytes down and FLOPs.
        """
        rates = {name: values[clients] for name, values in self.values.items()}
        self._share_link(rates, "up", work[:, Ledger.UP], self.devices.server_down)
        self._share_link(rates, "down", work[:, Ledger.DOWN], self.devices.server_up)

        spent = seconds(rates, work)
        self._worked[clients] += spent
        return spent

    def _share_link(
        self,
        rates: dict[str, np.ndarray],
        name: str,
        transferred: np.ndarray,
        server_rate: float | None,
    ) -> None:
        """Limit the clients' rates to their shares of the server's link.

        Args:
            rates: (C,) each, by name; the rate of this name is replaced.
            name: "up" or "down", from the point of view of a client.
            transferred: (C,) bytes.
            server_rate: Bytes per second at the other end of the link; None for no limit.
        """
        if server_rate is None:
            return
        users = int(np.count_nonzero(transferred))
        rates[name] = np.minimum(rates[name], server_rate / max(1, users))

    def _draw_delays(self, clients: Sequence[int], purpose: str) -> np.ndarray:
        """Return the delays of this round's sessions, (C,) seconds, and count them as work.

        Every client has its draw in every round, so that it does not depend on who takes part.
        """
        delays = np.zeros(len(clients))
        session_delay = self.devices.delay
        if session_delay is not None:
            rng = numpy_generator(self.seed, purpose, self._t)
            delays += session_delay.draw(rng, len(self._busy))[clients]

        step_delay = self.devices.step_delay
        if step_delay is not None:
            rng = numpy_generator(self.seed, f"step-{purpose}", self._t)
            steps = np.array([self._steps[client] for client in clients])
            delays += steps * step_delay.draw(rng, len(self._busy))[clients]

        self._worked[clients] += delays
        return delays

    def session_seconds(
        self, clients: Sequence[int], *, up: float | Sequence[float], purpose: str | None
    ) -> np.ndarray:
        """Return the virtual seconds of sessions, (C,), for a method that sets the time itself.

        The seconds are for what the clients have received and computed since the last call, and for
        what they send. The method then calls `advance_to`.

        Args:
            clients: Numbers of the clients.
            up: Bytes that they send, the same for all or one number for each.
            purpose: Names the draws of delays; None for sessions without delays.
        """
        self._is_closed = True
        self._method_sets_time = True
        work = self._take_work(clients)
        work[:, Ledger.UP] = up
        spent = self._spend(clients, work)
        if purpose is None:
            return spent
        return spent + self._draw_delays(clients, purpose)

    def advance_to(self, now: float) -> None:
        """Set the time of the end of this round, by the rule of a method of its own.

        Args:
            now: Virtual seconds since the start, not before the start of this round.
        """
        assert now >= self._round_start, "time goes forward"
        self.now = now

    @override
    def close_round(self, silent: Collection[int], usable: Mapping[int, bool]) -> dict[str, float]:
        """End a round and return its metrics; the arguments are those of `close`.

        Raises:
            UserError: Clients come and go, and the method has asked all of them.
        """
        if self._selected is None and self.devices.availability is not None:
            raise UserError(
                f"{DEVICES}.availability",
                "given, but the method trains all clients in every round",
                "leave it out",
            )

        self.close(silent, usable)
        if self._ledger.touched:
            self._work_after_the_merge()
        self._busy += self._worked

        worked = self._worked[np.flatnonzero(self._worked > 0)]
        idle = np.maximum(self.now - self._round_start - worked, 0.0)
        count = max(1, len(worked))
        metrics = {
            "virtual_time": self.now,
            "busy_time": float(worked.sum()) / count,
            "idle_time": float(idle.sum()) / count,
        }
        if not self.policy.waits:
            metrics["late"] = float(len(self.late))
        joules = self.joules()
        if joules is not None:
            metrics["joules"] = float((joules - self._joules_before).sum())
            self._joules_before = joules
        if self._learns:
            # The first round has none; it lasts as long as it lasts.
            lasted = self.now - self._round_start
            metrics["deadline"] = lasted if self._deadline is None else self._deadline
            self._deadline = self._next_deadline
        return metrics

    def _work_after_the_merge(self) -> None:
        """Spend what clients have done after the merge; the server waits for it too.

        It does not wait for clients that are late.
        """
        workers, work = self._new_work()
        if self._method_sets_time:
            return

        in_time = workers[self.finish[workers] <= self.now]
        begin = np.maximum(self.finish[workers], self.now)
        self.finish[workers] = begin + self._spend(workers, work)
        self.now = float(self.finish[in_time].max(initial=self.now))

    @override
    def discount(self, client: int) -> float:
        rounds_late = self.arrived.get(client, 0)
        return float((1 + rounds_late) ** -self.policy.exponent)

    @override
    def joules(self) -> np.ndarray | None:
        if not self._spends:
            return None
        bytes_up_and_down = self._ledger.bytes.sum(axis=1)
        of_bytes = bytes_up_and_down * self.values["joules_per_byte"]
        joules: np.ndarray = self._ledger.flops * self.values["joules_per_flop"] + of_bytes
        return joules

    @override
    def times(self) -> np.ndarray:
        idle = np.maximum(self.now - self._busy, 0.0)
        return np.stack([self._busy, idle], axis=1)
