"""FedNova: clients of unlike local work are averaged by their normalised updates.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization. NeurIPS 2020. https://arxiv.org/abs/2007.07481

    d_k = (x - y_k) / |a_k|,   x <- x - tau_eff sum_k p_k d_k,   tau_eff = sum_k p_k |a_k|

|a_k| is the sum of the weights that a session gives to its gradients: its steps for plain SGD. p_k
is n_k / n over the participants. As in the released code, tau_eff is sum_k p_k tau_k, of the steps,
with a proximal term, and a_k ignores weight decay. Its server momentum is `model.server_optimizer`:
SGD of rate 1; there a schedule of eta also scales the momentum. BatchNorm statistics are means
weighted by n_k. Left out: momentum beside a proximal term as released, where the pull is added to
the momentum buffer after each step. Here it is part of the gradient, and |a_k| follows from that.
"""

from collections.abc import Sequence
from math import inf

import torch
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.algorithm import require_argument
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.local.optimizer import Proximal
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator


class FedNova(FedAvg):
    """FedAvg whose weights do not depend on how many steps a client takes."""

    side_by_side = True

    def __init__(self, mu: float = 0.0, epochs: tuple[int, int] | None = None) -> None:
        """Set the local work.

        Args:
            mu: Proximal weight, as of FedProx.
            epochs: Least and most local epochs, drawn for each session; as configured by default.
        """
        super().__init__()
        require_argument(0 <= mu < inf, "mu", mu, "give a proximal weight of 0 or more")
        fits = epochs is None or 1 <= epochs[0] <= epochs[1]
        require_argument(fits, "epochs", epochs, "give two numbers from 1 on, the least first")
        self.mu, self.epochs = mu, epochs

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.directions = fed.keep("direction", durable=False)  # d_k
        self.lengths = fed.keep("length", durable=False)  # |a_k|, or tau_k

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients, x = fed.participants(t), self.model.parameters_row
        before, d, tau_eff = x.clone(), torch.zeros_like(x), x.new_zeros(())
        fed.send(self.model, clients)
        fed.train(clients, t, steps=self.steps(fed, clients, t))
        with fed.server_step(self.model):
            merged = fed.merge(clients, into=self.model)  # statistics remain as merged
            fed.average(self.directions, merged, into=d, weights="samples")  # sum_k p_k d_k
            fed.average(self.lengths, merged, into=tau_eff, weights="samples")
            x.copy_(before - tau_eff * d)
        fed.charge(clients, up=4)  # |a_k|

    def steps(self, fed: Fleet, clients: Sequence[int], t: int) -> dict[int, int] | None:
        """Steps of the sessions by client, of drawn epochs; None for as many as configured."""
        if self.epochs is None:
            return None
        draws = {k: numpy_generator(fed.seed, "epochs", t, k) for k in clients}
        least, most = self.epochs
        epochs = {k: int(rng.integers(least, most + 1)) for k, rng in draws.items()}
        return {k: n * fed.data.num_batches(k, t) for k, n in epochs.items()}

    @override
    def session_start(self, s: SessionContext) -> None:
        rule, name = s.group.optimizer.param_groups[0], type(s.group.optimizer).__name__
        plain = s.group.takes_lr and type(s.group.optimizer) is SGD
        plain = plain and not (rule["nesterov"] or rule["dampening"])
        fix = "name torch.optim.SGD there, without nesterov and dampening"
        require(plain, "model.optimizer", f"{name}, whose weights a_k are not known", fix)
        require_argument((s.lr or 0.0) * self.mu < 1, "mu", self.mu, f"give less than 1 / {s.lr}")

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        return Proximal(s.received, self.mu) if self.mu else None  # + mu (y_k - x)

    @override
    def session_end(self, s: SessionContext) -> None:
        rho, eta_mu = s.group.optimizer.param_groups[0]["momentum"], (s.lr or 0.0) * self.mu
        velocity = a = 0.0  # of a model that all gradients move by 1
        for _ in range(s.step):
            velocity = rho * velocity + 1 - eta_mu * a
            a += velocity
        self.directions[s.client] = (s.received - s.parameters) / a
        self.lengths[s.client] = torch.tensor(float(s.step) if self.mu else a)
