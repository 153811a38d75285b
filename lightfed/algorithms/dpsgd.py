"""D-PSGD with local epochs: decentralised, dense; the baseline of DisPFL without masks.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: Can Decentralized Algorithms Outperform Centralized
Algorithms? NeurIPS 2017. https://arxiv.org/abs/1705.09056

As in the released code of DisPFL, a client takes the plain mean over itself and its senders, and
then trains local epochs. The paper takes one gradient step, at the client's old model.
"""

from typing import Any

from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.topology.graph_summary import graph_facts
from lightfed.topology.topology import TimeVarying, Topology, hearing, warning_of_lonely


class DPSGD(Algorithm):
    """w_k <- mean over k and its neighbours, then E local epochs of SGD on D_k."""

    stateful = True
    moments = ("trained",)
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
        fed.one_layout("DPSGD needs one for all")
        self.topology.check(fed.clients)
        fed.warn(warning_of_lonely(self.topology, clients=fed.clients, seed=fed.seed))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        lists = hearing(self.topology, t, clients=fed.clients, seed=fed.seed, active=clients)
        fed.exchange(lists)  # w_k <- sum_j w_j / J,   j in S_k and k
        fed.train(clients, t)

    @override
    def facts(self, fed: Fleet) -> dict[str, Any]:
        return {"topology": graph_facts(self.topology, clients=fed.clients, seed=fed.seed)}
