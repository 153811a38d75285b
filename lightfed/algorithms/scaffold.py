"""SCAFFOLD: control variates correct the drift of clients with unlike data.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning. ICML 2020. https://arxiv.org/abs/1910.06378. Algorithm 1 with option II:

    y_i <- y_i - eta_l (g_i(y_i) - c_i + c),   c_i+ = c_i - c + (x - y_i) / (K eta_l)
    x <- x + eta_g / |S| sum_i (y_i - x),      c <- c + 1 / N sum_i (c_i+ - c_i)

Control variates start at 0. BatchNorm statistics have none, and are averaged. With momentum, which
the paper's clients lack, c_i+ is about 1 / (1 - momentum) times their gradient. Optimizers whose
steps are no multiples of gradients, such as Adam, are refused.
"""

import torch
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.one_model import OneModel
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.utils.bounds import Momentum, Positive
from lightfed.utils.errors import UserError


class SCAFFOLD(OneModel):
    """Clients step along g_i - c_i + c.

    Attributes:
        c: (P,) the server's control variate, the mean of all c_i.
    """

    side_by_side = True
    takes_late = True
    no_server_step = "SCAFFOLD has a step of its own, server_lr"
    c: Tensor

    def __init__(
        self, server_lr: Positive = 1.0, weights: Weights = "uniform", momentum: Momentum = 0.0
    ) -> None:
        """Set the steps.

        Args:
            server_lr: eta_g.
            weights: Weigh the y_i alike (uniform), as in the paper, or by the number of samples.
            momentum: The momentum of the clients' SGD. If it is given, the correction is kept out
                of the momentum, as in NIID-Bench.
        """
        super().__init__()
        self.server_lr = server_lr
        self.weights = weights
        self.momentum = momentum
        if momentum:
            self.no_kept_optimizer = "the correction is left out of a momentum that begins at 0"

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)  # x
        self.register_buffer("c", torch.zeros_like(self.model.parameters_row))
        self.controls = fed.keep("control", with_server=True)  # c_i
        self.changes = fed.keep("change", durable=False)  # c_i+ - c_i

    @override
    def round(self, fed: Fleet, t: int) -> None:
        x = self.model.parameters_row
        before = x.clone()

        clients = fed.participants(t)  # S
        fed.send(self.model, clients)  # y_i <- x
        fed.train(clients, t)
        # Besides models, c goes down and c_i+ - c_i up.
        control_bytes = fed.sizes(self.model, clients, buffers=False)
        fed.charge(clients, up=control_bytes, down=control_bytes)

        # x <- x + eta_g / |S| sum_i (y_i - x)
        merged = fed.merge(clients, into=self.model, weights=self.weights)
        x.copy_(before + self.server_lr * (x - before))

        # c <- c + 1 / N sum_i (c_i+ - c_i), in full: c stays the mean of all c_i
        mean_change = torch.zeros_like(x)
        fed.average(self.changes, merged, into=mean_change, in_full=True)
        self.c += len(merged) / len(fed.seen) * mean_change
        for i in fed.mine(merged):
            self.controls[i] = self.controls.get(i, 0.0) + self.changes[i]  # c_i <- c_i+

    @override
    def session_start(self, s: SessionContext) -> None:
        # (x - y_i) / (K eta_l) is the mean gradient of a session only if every step is eta_l times
        # a gradient, with one eta_l for all parameters, which is the round's.
        kind = type(s.group.optimizer)
        rates = {param_group["lr"] for param_group in s.group.optimizer.param_groups}
        has_own_rate = s.lr is None or not s.group.takes_lr
        if kind is SGD and len(rates) == 1 and not has_own_rate:
            return

        optimizer = kind.__name__
        if len(rates) > 1:
            optimizer += f" of {len(rates)} rates"
        if has_own_rate:
            optimizer += ", whose rate is its own"
        raise UserError(
            key="model.optimizer",
            found=optimizer,
            fix="name SGD; (x - y) / (K eta) is its mean gradient",
        )

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        correction = self.c - self.controls.get(s.client, 0.0)  # c - c_i
        # After the first step the momentum repeats what the earlier steps had of the correction.
        # Only the rest is added, so that each step has the correction once.
        is_first_step = s.step == 0
        gradient.add_(correction, alpha=1.0 if is_first_step else 1 - self.momentum)

    @override
    def session_end(self, s: SessionContext) -> None:
        assert s.lr is not None, "checked at the start"
        if not s.step:  # a module may skip every batch
            self.changes[s.client] = torch.zeros_like(s.parameters)
            return
        # c_i+ - c_i = (x - y_i) / (K eta_l) - c
        self.changes[s.client] = (s.received - s.parameters) / (s.step * s.lr) - self.c
