"""What a rank knows of the others, and who is at fault if a run cannot continue."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["running", "left", "failed", "lost"]


@dataclass
class Peer:
    """A rank and what it `said`: its error, or the collective that failed there."""

    rank: int
    host: str
    pid: int
    state: State = "running"
    said: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class Peers:
    """All ranks of a run, as one of them knows them."""

    def __init__(self, rank: int, peers: Sequence[Peer]) -> None:
        self._rank, self._peers = rank, peers
        self._order: list[Peer] = []  # in order of their messages

    def __getitem__(self, rank: int) -> Peer:
        return self._peers[rank]

    def receive(self, peer: Peer, state: State, said: str) -> None:
        """Record a peer's message about itself."""
        peer.state, peer.said = state, said
        self._order.append(peer)

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
            return f"{', '.join(map(str, left))} ended before the others"
        return f"{self._order[0]}: {self._order[0].said}"
