"""Clients without a server, which receive from the neighbours of a graph."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.peers.gossip import Exchange, Over
from lightfed.algorithms.topology.topology import (
    TimeVarying,
    Topology,
    round_senders,
)
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.state.rows import Moment


class Peers(Algorithm):
    """Every client keeps its model; the graph may change every round."""

    stateful = True
    no_server_step = "clients exchange models among themselves, without a server"
    no_policy = "clients exchange models without a server, which could wait"
    moments: tuple[Moment, ...] = ("trained",)
    tests_both = True

    def __init__(self, topology: Topology | None = None) -> None:
        """Set the graph.

        Args:
            topology: The graph; by default every client receives from 10 clients, redrawn every
                round.
        """
        super().__init__()
        self.topology = topology or TimeVarying()

    @override
    def setup(self, fed: Fleet) -> None:
        layout = fed.one_layout(f"{type(self).__name__} needs one for all")
        self.topology.check(fed.clients)
        self._exchange = Exchange(layout, fed.ranks, owner=fed.places.owner, device=fed.row_device)

    def senders(self, fed: Fleet, t: int, active: Sequence[int]) -> dict[int, list[int]]:
        """S_{k,t}: the active clients that each active client receives from, in round t."""
        return round_senders(self.topology, t, clients=fed.clients, seed=fed.seed, active=active)

    def exchange(
        self,
        fed: Fleet,
        senders: Mapping[int, Sequence[int]],
        *,
        masks: Mapping[int, Tensor] | None = None,
        keep: Mapping[int, Tensor] | None = None,
        over: Over = "covered",
    ) -> None:
        """Replace every listed client's row by the mean over itself and its senders.

        All read the old rows; sums are in ascending order of the clients.

        Args:
            fed: Of the clients.
            senders: Receiver -> its senders, without itself; the same on every rank.
            masks: Of this rank's clients: packed words (P / 32,) of a row's covered elements; None
                for all.
            keep: Of this rank's receivers: elements of the mean that they keep; None for all.
            over: Divide by the number of rows that cover an element, or by that of all rows.
        """
        fed.clock.meet(senders)
        if fed.only_counts(senders, masked=masks is not None):
            return

        mine = fed.mine(range(fed.clients))
        block = fed.client_rows.view(mine)
        each = map(fed.row, mine) if block is None else block.each()
        rows = dict(zip(mine, each, strict=True))
        sizes = self._exchange.mean_(rows, senders, masks=masks, keep=keep, over=over, block=block)

        pairs = [(receiver, sender) for receiver in sorted(senders) for sender in senders[receiver]]
        sent = [sizes[sender] for _, sender in pairs]
        fed.ledger.sent_up([sender for _, sender in pairs], sent)
        fed.ledger.sent_down([receiver for receiver, _ in pairs], sent)
