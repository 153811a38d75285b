"""D-PSGD with local epochs: decentralized and dense; the baseline of DisPFL without masks.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: Can Decentralized Algorithms Outperform Centralized
Algorithms? NeurIPS 2017. https://arxiv.org/abs/1705.09056

Deviations, as in the released code of DisPFL: A client takes the plain mean over itself and its
senders, and then trains local epochs. The paper takes one gradient step, whose gradient is that at
the client's old model, and its weights are symmetric and doubly stochastic. Those of a plain mean
are so in undirected graphs in which all clients have as many neighbors (Ring, Full). In others,
such as a star, what the clients agree on is not their plain mean.
"""

from typing_extensions import override

from lightfed.algorithms.peers.peers import Peers
from lightfed.api.fleet import Fleet


class DPSGD(Peers):
    """w_k <- mean over k and its neighbors, then E local epochs of SGD on D_k."""

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        self.exchange(fed, self.senders(fed, t, clients))  # w_k <- sum_j w_j / J,   j in S_k and k
        fed.train(clients, t)
