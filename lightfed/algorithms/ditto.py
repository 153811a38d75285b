"""Ditto: every client keeps a personal model near the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML
2021. https://arxiv.org/abs/2012.04221

    min_v  F_k(v) + lambda / 2 ||v - w||^2,   w the model that FedAvg sends this round

The global model is FedAvg's: personal models are never sent. A personal model starts from the
initial one, changes when its client takes part, and trains on the batches of the global model's
session, in their order. In the released code the two take turns on every batch, with the same
result.

Not implemented: the released code's attacks, robust means and search for lambda.
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
    takes_late = True
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
            lam: lambda; with 0 the personal models are left to themselves.
            weights: Weigh all participants alike (uniform), as in the released code, or by their
                number of samples.
            epochs: Local epochs of a personal model. By default as long as the global model's.
        """
        super().__init__()
        self.lam = lam
        self.epochs = epochs
        self.weights: Weights = weights
        self._anchor: Tensor | None = None  # w, while personal models train

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout("Ditto needs one for all")
        self.model = fed.new_model()

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        w = self.model.parameters_row.clone()

        # A client has one row: v_k steps aside while the row is w_k.
        personal = {k: fed.row(k).clone() for k in fed.mine(clients)}
        fed.send(self.model, clients)  # w_k <- w
        fed.train(clients, t)
        fed.merge(clients, into=self.model, weights=self.weights)
        for k, v in personal.items():
            fed.row(k).copy_(v)

        # v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w))
        self._anchor = w
        fed.train(clients, t, steps=self._steps(fed, clients, t))
        self._anchor = None

    def _steps(self, fed: Fleet, clients: list[int], t: int) -> dict[int, int] | None:
        """Return the steps of each client's personal session; None for as many as configured."""
        if self.epochs is None:
            return None
        return {k: self.epochs * fed.data.num_batches(k, t) for k in clients}

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        if s.round < 0:  # a client that is never met: v_k starts from w, and is pulled to it
            return Proximal(self.model.parameters_row, self.lam)
        if self._anchor is None:  # the session of w_k
            return None
        return Proximal(self._anchor, self.lam)
