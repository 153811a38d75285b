"""q-FFL: clients with larger losses weigh more, so that accuracies become more alike.

Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning. ICLR 2020.
https://arxiv.org/abs/1905.10497. Algorithm 2, q-FedAvg:

    d_k = L (w - w_k),   D_k = F_k(w)^q d_k,   h_k = q F_k(w)^(q-1) |d_k|^2 + L F_k(w)^q
    w <- w - sum_k D_k / sum_k h_k

BatchNorm statistics are means with weights F_k^q.

Deviation, as in the released code: clients are drawn uniformly.
"""

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Positive, Weight


class QFFL(Algorithm):
    """FedAvg for the mean of F_k^(q+1) / (q + 1).

    Attributes:
        measured: (N, 2) F_k(w) and |w_k - w|^2 of each client's last session, if late updates are
            kept.
    """

    takes_late = True
    no_server_step = "q-FFL has a step of its own"
    no_personal = "the length of a step is that of whole models"
    model: ServerModel
    measured: Tensor

    def __init__(self, q: Weight, lipschitz: Positive) -> None:
        """Set how fair the federation is.

        Args:
            q: Exponent of the losses; 0 is FedAvg with equal weights.
            lipschitz: L, an estimate of the Lipschitz constant of the gradients, such as 1 /
                learning rate.
        """
        super().__init__()
        self.q = q
        self.lipschitz = lipschitz

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout("q-FFL needs one for all")
        self.model = fed.new_model()
        if fed.keeps_late:
            measured = torch.zeros(fed.clients, 2, dtype=torch.float64)
            self.register_buffer("measured", measured)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        q = self.q
        L = self.lipschitz
        w = self.model.parameters_row
        before = w.clone()

        clients = fed.participants(t)
        fed.send(self.model, clients)  # w_k <- w
        losses = self._losses(fed, clients, t)  # F_k(w)
        fed.train(clients, t)
        moved = self._moved(fed, clients, before)  # |w_k - w|^2
        if fed.keeps_late:
            losses, moved = self._with_late(losses, moved)
        fed.charge(clients, up=4)  # h_k

        # With a_k = F_k^q the merge gives the mean sum_k a_k w_k / sum_k a_k, and
        # sum_k D_k = L sum_k a_k (w - mean).
        weights = {k: losses[k] ** q for k in losses}
        merged = fed.merge(clients, into=self.model, weights=weights)
        # A late client has a smaller a_k in both sums, as in the mean.
        a = {k: weights[k] * fed.clock.discount(k) for k in merged}
        step = L * sum(a.values())
        # h_k = L a_k (1 + q L |w_k - w|^2 / F_k), by |d_k|^2 = L^2 |w_k - w|^2
        h = sum(L * a[k] * (1 + q * L * moved[k] / losses[k]) for k in merged)
        if h > 0:
            w.copy_(before + step / h * (w - before))

    def _losses(self, fed: Fleet, clients: list[int], t: int) -> dict[int, float]:
        """Return F_k(w) of each client, on every rank."""
        of_all_ranks = fed.collect({k: fed.loss(k, t) for k in fed.mine(clients)})
        # Above 0, as in the released code: h_k divides by it.
        return {k: of_all_ranks[k] + 1e-10 for k in clients}

    def _moved(self, fed: Fleet, clients: list[int], before: Tensor) -> dict[int, float]:
        """Return |w_k - w|^2 of each client, on every rank; `before` is w, (P,)."""
        squares = {}
        for k in fed.mine(clients):
            away = fed.row(k).floats[: len(before)].to(before) - before
            squares[k] = float(away.double().square().sum())
        return fed.collect(squares)

    def _with_late(
        self, losses: dict[int, float], moved: dict[int, float]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return F_k(w) and |w_k - w|^2 of all clients, each of its last session."""
        for k, loss in losses.items():
            self.measured[k] = torch.tensor([loss, moved[k]], dtype=torch.float64)
        of_clients = dict(enumerate(self.measured.tolist()))
        losses = {k: loss for k, (loss, _) in of_clients.items()}
        moved = {k: length for k, (_, length) in of_clients.items()}
        return losses, moved
