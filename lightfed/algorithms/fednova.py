"""FedNova: clients of unlike local work are averaged by their normalised updates.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization. NeurIPS 2020. https://arxiv.org/abs/2007.07481

    d_k = (x - y_k) / l_k,   x <- x - tau_eff sum_k p_k d_k,   tau_eff = sum_k p_k l_k

l_k, the 1-norm of the paper's a_k, is the sum of the weights of a session's gradients in x - y_k:
for plain SGD tau_k, its steps. p_k is n_k / n over the participants. As in the released code,
tau_eff is sum_k p_k tau_k with a proximal term, and l_k ignores weight decay. Its server momentum
is SGD of rate 1 as `model.server_optimizer`, at a constant eta. BatchNorm statistics are means
weighted by n_k. Deviation: with momentum, that code also adds the proximal term to the momentum
buffer.
"""

import torch
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.algorithm import require_argument
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.local.penalties import Pull
from lightfed.utils.bounds import Count, Weight
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator


class FedNova(FedAvg):
    """FedAvg whose weights do not depend on how many steps a client takes."""

    side_by_side = True
    no_kept_optimizer = "updates are normalised by sessions that begin without momentum"

    def __init__(self, mu: Weight = 0.0, epochs: tuple[Count, Count] | None = None) -> None:
        """Set the local work.

        Args:
            mu: Proximal weight, as of FedProx, or of a `Pull` in `model.local_penalty`.
            epochs: Least and most local epochs, drawn for each session; as configured by default.
        """
        super().__init__()
        ordered = epochs is None or epochs[0] <= epochs[1]
        require_argument(ordered, "epochs", epochs, "give the least first")
        self.local_penalty, self.epochs = Pull(mu) if mu else None, epochs

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.mu = sum(penalty.mu for penalty in fed.penalties if isinstance(penalty, Pull))
        self.updates = fed.keep("update", durable=False)  # d_k, and l_k or tau_k

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients, x = fed.participants(t), self.model.parameters_row
        before, mean = x.clone(), x.new_zeros(len(x) + 1)
        fed.send(self.model, clients)
        fed.train(clients, t, steps=self.steps(fed, clients, t))
        fed.charge(clients, up=4)  # l_k
        with fed.server_step(self.model):
            merged = fed.merge(clients, into=self.model)  # statistics remain as merged
            fed.average(self.updates, merged, into=mean, weights="samples")
            x.copy_(before - mean[-1] * mean[:-1])  # x - tau_eff sum_k p_k d_k

    def steps(self, fed: Fleet, clients: list[int], t: int) -> dict[int, int] | None:
        """Steps of the sessions by client, of drawn epochs; None for as many as configured."""
        if self.epochs is None:
            return None
        draws = {k: numpy_generator(fed.seed, "epochs", t, k) for k in clients}
        epochs = {k: int(rng.integers(*self.epochs, endpoint=True)) for k, rng in draws.items()}
        return {k: n * fed.data.num_batches(k, t) for k, n in epochs.items()}

    @override
    def session_start(self, s: SessionContext) -> None:
        rules, kind = s.group.optimizer.param_groups, type(s.group.optimizer)
        rule = rules[0]
        plain = kind is SGD and s.group.takes_lr and not (rule["nesterov"] or rule["dampening"])
        require(plain, "model.optimizer", kind.__name__, "name SGD without nesterov, dampening")
        # l_k is one number for all parameters.
        unlike = [
            key
            for key in ("momentum", "lr", "nesterov", "dampening")
            if any(other[key] != rule[key] for other in rules) and (key != "lr" or self.mu)
        ]
        found = f"{kind.__name__} with groups of unlike {', '.join(unlike)}"
        require(not unlike, "model.optimizer", found, "give all parameters the same")
        require_argument((s.lr or 0.0) * self.mu < 1, "mu", self.mu, f"give less than 1 / {s.lr}")

    @override
    def session_end(self, s: SessionContext) -> None:
        if not s.step:  # a module may skip every batch
            self.updates[s.client] = s.parameters.new_zeros(len(s.parameters) + 1)
            return
        rho, eta_mu = s.group.optimizer.param_groups[0]["momentum"], (s.lr or 0.0) * self.mu
        velocity = a = 0.0  # of a model that all gradients move by 1
        for _ in range(s.step):
            velocity = rho * velocity + 1 - eta_mu * a
            a += velocity
        d, length = (s.received - s.parameters) / a, s.step if self.mu else a
        self.updates[s.client] = torch.cat([d, d.new_tensor([length])])
