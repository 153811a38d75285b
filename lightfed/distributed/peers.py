"""What a rank knows of the others: who is silent, and who is at fault if a run cannot continue."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

BEAT = 10.0  # seconds between the signs of life of a rank
SILENT = 45.0  # seconds without one after which a rank is reported

State = Literal["running", "left", "failed", "late", "lost"]


@dataclass
class Peer:
    """A rank and what it `said`: its error, the collective that was `late`, how it was `lost`."""

    rank: int
    host: str
    pid: int
    state: State = "running"
    said: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class Peers:
    """All ranks of a run, as one of them knows them; they wait `limit` seconds for each other."""

    def __init__(self, rank: int, peers: Sequence[Peer], limit: float) -> None:
        self._rank, self._peers, self._limit = rank, peers, limit
        self._order: list[Peer] = []  # in order of their messages

    def __getitem__(self, rank: int) -> Peer:
        return self._peers[rank]

    def receive(self, peer: Peer, state: State, said: str) -> None:
        """Record a peer's message about itself."""
        peer.state, peer.said = state, said
        self._order.append(peer)

    @property
    def late(self) -> list[Peer]:
        """Those that have waited in vain for a collective, in order."""
        return [peer for peer in self._order if peer.state == "late"]

    def reports_rank_0(self) -> bool:
        """Whether this rank reports the loss of rank 0: the first one on another node, if any."""
        others = self._peers[1:]
        elsewhere = [peer for peer in others if peer.host != self._peers[0].host]
        return self._rank == (elsewhere or others)[0].rank

    def reason(self) -> str:
        """Why the run cannot continue, as known to rank 0."""
        failed = [peer for peer in self._order if peer.state == "failed"]
        if failed:
            return f"{failed[0]} ended with an error ({failed[0].said})"
        if left := [peer for peer in self._peers if peer.state == "left"]:
            return f"{_names(left)} ended before the others"
        silent = [peer for peer in self._peers if peer.state == "running"]
        if self.late:
            who = f"{_names(silent)} did" if silent else "ranks waited for each other, and did"
            return f"{who} not reach {self._within(self.late[0].said)}"
        return f"{self._order[0]}: {self._order[0].said}"

    def silence_of_rank_0(self, what: str) -> str:
        """Why rank 0 does not answer after a collective `what` has failed."""
        ended = self._peers[0].state != "running"
        end = "ended before the others" if ended else f"did not reach {self._within(what)}"
        return f"{self._peers[0]} {end}"

    def _within(self, what: str) -> str:
        return f"{what} within {self._limit / 60:g} minutes"


def _names(peers: Sequence[Peer]) -> str:
    return ", ".join(map(str, peers))


class Silence:
    """When the peers of a rank were last heard from.

    A rank whose connection stands may be stopped, or without memory. `limit` is the silence in
    seconds that ends the run.
    """

    def __init__(self, ranks: Iterable[int], limit: float) -> None:
        self.limit = max(limit, 2 * SILENT)
        self._looked = time.monotonic()
        self._heard = dict.fromkeys(ranks, self._looked)
        self._reported: set[int] = set()

    def heard(self, rank: int) -> bool:
        """Note a sign of life; whether the rank had been reported."""
        self._heard[rank] = time.monotonic()
        reported = rank in self._reported
        self._reported.discard(rank)
        return reported

    def forget(self, rank: int) -> None:
        """Expect nothing more from a rank."""
        self._heard.pop(rank, None)

    def look(self) -> tuple[list[int], list[int]]:
        """The ranks to report now, each once, and those whose silence ends the run.

        Call it about every BEAT. If that was not possible, this process itself was stopped, perhaps
        with all others: then the wait begins again.
        """
        now = time.monotonic()
        if now - self._looked > SILENT / 2:
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        silent = {rank: now - since for rank, since in self._heard.items()}
        new = [r for r, seconds in silent.items() if seconds > SILENT and r not in self._reported]
        self._reported.update(new)
        return new, [rank for rank, seconds in silent.items() if seconds > self.limit]
