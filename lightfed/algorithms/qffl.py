"""q-FFL: clients with larger losses weigh more, so that accuracies are more alike.

Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning. ICLR 2020.
https://arxiv.org/abs/1905.10497. Algorithm 2, q-FedAvg:

    d_k = L (w - w_k),   D_k = F_k(w)^q d_k,   h_k = q F_k(w)^(q-1) |d_k|^2 + L F_k(w)^q
    w <- w - sum_k D_k / sum_k h_k

Clients are drawn uniformly, as in the released code. BatchNorm statistics are means with weights
F_k^q.
"""

from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Positive, Weight


class QFFL(Algorithm):
    """FedAvg for the mean of F_k^(q+1) / (q + 1)."""

    no_server_step = "q-FFL has a step of its own"
    no_personal = "the length of a step is that of whole models"
    model: ServerModel

    def __init__(self, q: Weight, lipschitz: Positive) -> None:
        """Set how fair the federation is.

        Args:
            q: Exponent of the losses; 0 is FedAvg with equal weights.
            lipschitz: L, an estimate of the Lipschitz constant of the gradients, such as 1 /
                learning rate.
        """
        super().__init__()
        self.q, self.lipschitz = q, lipschitz

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout("q-FFL needs one for all")
        self.model = fed.new_model()

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients, w, q, L = fed.participants(t), self.model.parameters_row, self.q, self.lipschitz
        before = w.clone()
        fed.send(self.model, clients)
        found = fed.collect({k: fed.loss(k, t) for k in fed.mine(clients)})
        losses = {k: found[k] + 1e-10 for k in clients}  # F_k(w), above 0 as in that code
        fed.train(clients, t)
        mine = {k: fed.row(k).floats[: len(w)].to(w) - before for k in fed.mine(clients)}
        moved = fed.collect({k: float(v.double().square().sum()) for k, v in mine.items()})
        scales = {k: losses[k] ** q for k in clients}
        fed.charge(clients, up=4)  # h_k
        merged = fed.merge(clients, into=self.model, weights=scales)  # sum F^q w_k / sum F^q
        step = L * sum(scales[k] for k in merged)
        h = sum(L * scales[k] * (1 + q * L * moved[k] / losses[k]) for k in merged)
        if h > 0:
            w.copy_(before + step / h * (w - before))
