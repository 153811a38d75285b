"""Clients without a server, each of which receives from its neighbors in a graph."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.peers.gossip import Exchange, Over
from lightfed.algorithms.topology.topology import TimeVarying, Topology, round_senders
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.state.rows import Moment


class Peers(Algorithm):
    """Every client keeps its own model; the graph may change from round to round."""

    stateful = True
    no_server_step = "clients exchange models among themselves, without a server"
    no_unseen = "clients exchange models among themselves, and an unseen one has no neighbors"
    no_policy = "clients exchange models without a server, which could wait"
    moments: tuple[Moment, ...] = ("trained",)
    tests_both = True

    def __init__(self, topology: Topology | None = None) -> None:
        """Set the graph.

        Args:
            topology: The graph. By default every client receives from 10 clients, redrawn every
                round.
        """
        super().__init__()
        self.topology = TimeVarying() if topology is None else topology

    @override
    def setup(self, fed: Fleet) -> None:
        layout = fed.one_layout(f"{type(self).__name__} needs one for all")
        self.topology.check(fed.clients)
        self._exchange = Exchange(layout, fed.ranks, owner=fed.places.owner, device=fed.row_device)

    def senders(self, fed: Fleet, t: int, active: Sequence[int]) -> dict[int, list[int]]:
        """Return S_{k,t}: the active clients that each active client k receives from in round t."""
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
        """Replace the row of every receiver by the mean over itself and its senders.

        All read the old rows; sums are in ascending order of the clients.

        Args:
            fed: The clients.
            senders: Receiver -> its senders, without itself; the same on every rank.
            masks: Of this rank's clients: packed words (P / 32,) of the elements that a row covers;
                None if rows are dense.
            keep: Of this rank's receivers: packed words of the elements of the mean that they keep;
                None if they keep all.
            over: Whether to divide by the number of rows that cover an element, or by that of all
                rows.
        """
        # In virtual time a receiver waits for its senders, also in a dry run.
        fed.clock.meet(senders)
        if fed.only_counts(senders, masked=masks is not None):
            return

        # One view of all rows, where they follow each other in one store.
        clients_on_this_rank = fed.mine(range(fed.clients))
        block = fed.client_rows.view(clients_on_this_rank)
        if block is None:
            rows = {client: fed.row(client) for client in clients_on_this_rank}
        else:
            rows = dict(zip(clients_on_this_rank, block.each(), strict=True))
        sizes = self._exchange.mean_(rows, senders, masks=masks, keep=keep, over=over, block=block)

        # Every rank counts the messages of all clients, in one call: graphs have many edges.
        receiving: list[int] = []
        sending: list[int] = []
        for receiver in sorted(senders):
            for sender in senders[receiver]:
                receiving.append(receiver)
                sending.append(sender)
        sent = [sizes[sender] for sender in sending]
        fed.ledger.sent_up(sending, sent)
        fed.ledger.sent_down(receiving, sent)
