"""FedNova: clients that do unlike amounts of local work are averaged by normalized updates.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization. NeurIPS 2020. https://arxiv.org/abs/2007.07481

    d_k = (x - y_k) / l_k,   x <- x - tau_eff sum_k p_k d_k,   tau_eff = sum_k p_k l_k

l_k is the 1-norm of the paper's a_k: the sum of the weights that the gradients of a session have in
x - y_k. For plain SGD it is tau_k, the number of steps. p_k is n_k / n over the participants.

As in the released code, tau_eff is sum_k p_k tau_k with a proximal term, and l_k ignores weight
decay. The server momentum of that code is SGD of rate 1 as `model.server_optimizer`, at a constant
eta. BatchNorm statistics are means weighted by n_k.

Deviation: with momentum, the released code also adds the proximal term to the momentum buffer.
"""

import torch
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.local.penalties import Pull
from lightfed.utils.bounds import Count, Weight
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator


class FedNova(FedAvg):
    """FedAvg in which a client's weight does not depend on how many steps it takes."""

    side_by_side = True
    takes_late = True
    no_kept_optimizer = "updates are normalized by sessions that begin without momentum"

    def __init__(self, mu: Weight = 0.0, epochs: tuple[Count, Count] | None = None) -> None:
        """Set the local work.

        Args:
            mu: Proximal weight, as in FedProx. A `Pull` in `model.local_penalty` adds its own.
            epochs: Least and most local epochs, drawn for each session. As configured by default.
        """
        super().__init__()
        if epochs is not None and epochs[0] > epochs[1]:
            raise UserError(f"{KEY}.epochs", f"{epochs}", "give the least first")
        self.local_penalty = Pull(mu) if mu else None
        self.epochs = epochs

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.mu = sum(penalty.mu for penalty in fed.penalties if isinstance(penalty, Pull))
        # d_k, and in a last element l_k, or tau_k with a proximal term.
        self.updates = fed.keep("update", durable=False)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        x = self.model.parameters_row
        before = x.clone()

        clients = fed.participants(t)
        fed.send(self.model, clients)
        fed.train(clients, t, steps=self.steps(fed, clients, t))
        fed.charge(clients, up=4)  # l_k

        with fed.server_step(self.model):
            merged = fed.merge(clients, into=self.model)  # statistics remain as merged
            mean = x.new_zeros(len(x) + 1)
            fed.average(self.updates, merged, into=mean, weights="samples")
            mean_update = mean[:-1]  # sum_k p_k d_k
            tau_eff = mean[-1]
            x.copy_(before - tau_eff * mean_update)

    def steps(self, fed: Fleet, clients: list[int], t: int) -> dict[int, int] | None:
        """Return the number of steps in each client's session, for a drawn number of epochs.

        None stands for as many as configured.
        """
        if self.epochs is None:
            return None
        least, most = self.epochs
        steps = {}
        for k in clients:
            rng = numpy_generator(fed.seed, "epochs", t, k)
            epochs = int(rng.integers(least, most, endpoint=True))
            steps[k] = epochs * fed.data.num_batches(k, t)
        return steps

    @override
    def session_start(self, s: SessionContext) -> None:
        self._check_optimizer(s)
        if (s.lr or 0.0) * self.mu >= 1:
            # Each step would overshoot the model that it is pulled to.
            raise UserError(f"{KEY}.mu", f"{self.mu}", f"give less than 1 / {s.lr}")

    def _check_optimizer(self, s: SessionContext) -> None:
        """Refuse an optimizer for whose sessions there is no l_k.

        l_k is known for SGD, with or without momentum, and is one number for all parameters.
        """
        kind = type(s.group.optimizer)
        param_groups = s.group.optimizer.param_groups
        first = param_groups[0]
        if kind is not SGD or not s.group.takes_lr or first["nesterov"] or first["dampening"]:
            raise UserError(
                "model.optimizer", kind.__name__, "name SGD without nesterov, dampening"
            )

        # Without a proximal term l_k does not depend on the learning rate.
        settings = ["momentum", "lr", "nesterov", "dampening"]
        if not self.mu:
            settings.remove("lr")
        unlike = [
            setting
            for setting in settings
            if any(group[setting] != first[setting] for group in param_groups)
        ]
        if unlike:
            raise UserError(
                key="model.optimizer",
                found=f"{kind.__name__} whose parameter groups differ in {', '.join(unlike)}",
                fix="give all parameters the same values",
            )

    @override
    def session_end(self, s: SessionContext) -> None:
        if not s.step:  # a module may skip every batch
            self.updates[s.client] = s.parameters.new_zeros(len(s.parameters) + 1)
            return

        # l_k is how far a parameter with gradients of 1 moves, in units of the learning rate.
        momentum = s.group.optimizer.param_groups[0]["momentum"]
        eta_mu = (s.lr or 0.0) * self.mu
        velocity = 0.0
        length = 0.0
        for _ in range(s.step):
            velocity = momentum * velocity + 1 - eta_mu * length
            length += velocity

        d = (s.received - s.parameters) / length
        share_of_tau_eff = s.step if self.mu else length
        # Made on the device: a number that comes from the host would make it wait.
        self.updates[s.client] = torch.cat([d, d.new_full((1,), share_of_tau_eff)])
