"""Ditto: every client keeps a personal model near the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML
2021. https://arxiv.org/abs/2012.04221

    min_v  F_k(v) + lambda / 2 ||v - w||^2,   w the model that FedAvg sends this round

The global model is FedAvg's: personal models are never sent. A personal model starts from the
initial one, changes when its client takes part, and trains on the batches of the global one's
session, in their order. In the released code the two take turns on every batch, with the same
result. Its attacks, its robust means and its search for lambda are left out.
"""

from torch import Tensor
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.local.optimizer import Proximal
from lightfed.state.rows import Moment
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Weight


class Ditto(Algorithm):
    """FedAvg, and after it a session of the personal model of every participant."""

    stateful = True  # a client's row is v_k
    side_by_side = True
    moments: tuple[Moment, ...] = ("aggregated", "trained")
    no_kept_optimizer = "clients train two models"
    no_memory = "clients train two models, and both would enter one memory"
    holds = "its personal model"
    model: ServerModel

    def __init__(
        self, lam: Weight = 1.0, weights: Weights = "uniform", epochs: Count | None = None
    ) -> None:
        """Set the pull to the global model.

        Args:
            lam: lambda; 0 leaves the personal models to themselves.
            weights: Of the participants in the mean: uniform, as in the released code, or by
                samples.
            epochs: Local epochs of a personal model; as long as the global one's by default.
        """
        super().__init__()
        self.lam, self.epochs = lam, epochs
        self.weights: Weights = weights
        self._anchor: Tensor | None = None  # w, while personal models train

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout("Ditto needs one for all")
        self.model = fed.new_model()

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients, w = fed.participants(t), self.model.parameters_row.clone()
        personal = {k: fed.row(k).clone() for k in fed.mine(clients)}
        fed.send(self.model, clients)
        fed.train(clients, t)
        fed.merge(clients, into=self.model, weights=self.weights)
        for client, v in personal.items():
            fed.row(client).copy_(v)
        self._anchor = w
        n = self.epochs
        steps = {k: n * fed.data.num_batches(k, t) for k in clients} if n else None
        fed.train(clients, t, steps=steps)  # v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w))
        self._anchor = None

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        return None if self._anchor is None else Proximal(self._anchor, self.lam)
