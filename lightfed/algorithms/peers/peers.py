"""Clients without a server, which receive from the neighbours of a graph."""

from collections.abc import Sequence

from typing_extensions import override

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
        fed.one_layout(f"{type(self).__name__} needs one for all")
        self.topology.check(fed.clients)

    def senders(self, fed: Fleet, t: int, active: Sequence[int]) -> dict[int, list[int]]:
        """S_{k,t}: the active clients that each active client receives from, in round t."""
        return round_senders(self.topology, t, clients=fed.clients, seed=fed.seed, active=active)
