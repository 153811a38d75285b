"""Ditto: every client keeps a personal model near the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML
2021. https://arxiv.org/abs/2012.04221

    min_v  F_k(v) + lambda / 2 ||v - w||^2,   w the model that FedAvg sends this round
"""

from torch import Tensor
from typing_extensions import override

from lightfed import Algorithm, Fleet, ServerModel
from lightfed.local.hooks import SessionContext
from lightfed.local.optimizer import Proximal


class OwnDitto(Algorithm):
    """FedAvg, and after it a session of the personal model of every participant."""

    stateful = True  # a client's row is v_k
    moments = ("aggregated", "trained")
    holds = "its personal model, v_k"
    model: ServerModel

    def __init__(self, lam: float = 1.0, weights: str = "uniform", epochs: int = 1) -> None:
        super().__init__()
        self.lam = lam
        self.weights = weights
        self.epochs = epochs  # of the personal model
        self._anchor: Tensor | None = None  # w, while personal models train

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout("Ditto needs one for all")
        self.model = fed.new_model()

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients, w = fed.participants(t), self.model.parameters_row.clone()
        personal = {k: fed.row(k).floats.clone() for k in fed.mine(clients)}
        fed.send(self.model, clients)
        fed.train(clients, t)
        fed.merge(clients, into=self.model, weights=self.weights)
        for client, v in personal.items():
            fed.row(client).floats.copy_(v)
        self._anchor = w
        steps = {k: self.epochs * fed.data.num_batches(k, t) for k in clients}
        fed.train(clients, t, steps=steps)  # v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w))
        self._anchor = None

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        return None if self._anchor is None else Proximal(self._anchor, self.lam)
