"""D-PSGD with local epochs: decentralised, dense; the baseline of DisPFL without masks.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: Can Decentralized Algorithms Outperform Centralized
Algorithms? NeurIPS 2017. https://arxiv.org/abs/1705.09056

As in the released code of DisPFL, a client takes the plain mean over itself and its senders, and
then trains local epochs. The paper takes one gradient step, at the client's old model, and its
weights are symmetric and doubly stochastic. Those of a plain mean are so in undirected graphs in
which all have as many neighbours (Ring, Full); in others, such as a star, what clients
agree on is not their plain mean.
"""

from typing_extensions import override

from lightfed.algorithms.peers.peers import Peers
from lightfed.api.fleet import Fleet


class DPSGD(Peers):
    """w_k <- mean over k and its neighbours, then E local epochs of SGD on D_k."""

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.exchange(self.senders(fed, t, clients))  # w_k <- sum_j w_j / J,   j in S_k and k
        fed.train(clients, t)
