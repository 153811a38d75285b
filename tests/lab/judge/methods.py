"""Methods to judge: one that is in order, and others that are not."""

from typing import Any

from typing_extensions import override

import lightfed as lf
from lightfed.algorithms.fedavg import FedAvg


class Alike(lf.Algorithm):
    """w <- the mean of the clients' w_k, in which each client counts alike."""

    @override
    def setup(self, fed: Any) -> None:
        fed.one_layout("Alike needs one for all")
        self.model = fed.new_model()

    @override
    def round(self, fed: Any, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)
        fed.train(clients, t)
        fed.merge(clients, into=self.model, weights=dict.fromkeys(clients, 1))


class OfRanks(Alike):
    """Breaks the promise: what it learns depends on how clients lie on ranks."""

    @override
    def round(self, fed: Any, t: int) -> None:
        super().round(fed, t)
        self.model.floats.mul_(1 + 0.01 * len(fed.mine(fed.participants(t))))


class Raising(Alike):
    """Cannot train."""

    @override
    def round(self, fed: Any, t: int) -> None:
        raise KeyError("velocity")


class Needing(Alike):
    """Cannot be made without arguments."""

    def __init__(self, beta: float, gamma: float, delta: float = 0.0) -> None:
        super().__init__()


class Unfinished(lf.Algorithm):
    """Has no round."""

    @override
    def setup(self, fed: Any) -> None: ...


class Endless(Alike):
    """Never ends its first round, and uses CPU time."""

    @override
    def round(self, fed: Any, t: int) -> None:
        while True:
            pass


class Namesake(FedAvg):
    """Is named like a method of lightfed, below."""


Namesake.__name__ = "FedAvg"


class Plain:
    """Is no method."""
