"""Standalone: every client trains alone on its own data.

It is the floor that federated learning has to beat.

There is no exchange, so clients keep their rows from round to round. The optimizer is reset in
every round, as in the federated methods. All clients of a group start from the same values.
"""

from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet


class Standalone(Algorithm):
    """w_k <- E local epochs of SGD on D_k, from w_k."""

    stateful = True
    no_server_step = "Standalone has no server"
    no_policy = "Standalone has no server"
    no_unseen = "Standalone has no server, which could give a client a model"
    moments = ("trained", "aggregated")  # the same model: nothing is aggregated
    holds = "the model that it trains alone"

    @override
    def setup(self, fed: Fleet) -> None:
        pass  # without a server there is no state

    @override
    def round(self, fed: Fleet, t: int) -> None:
        fed.train(fed.participants(t), t)
