"""What a rank knows of the others, and who is at fault if a run cannot continue."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
