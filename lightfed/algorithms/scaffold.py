"""SCAFFOLD: control variates correct the drift of clients with unlike data.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning. ICML 2020. https://arxiv.org/abs/1910.06378. Option II.

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
from lightfed.utils.errors import require


class SCAFFOLD(OneModel):
    """Clients step along g_i - c_i + c."""

    side_by_side = True
    no_server_step = "SCAFFOLD has a step of its own, server_lr"
    c: Tensor

    def __init__(
        self, server_lr: Positive = 1.0, weights: Weights = "uniform", momentum: Momentum = 0.0
    ) -> None:
        """Set the steps.

        Args:
            server_lr: eta_g.
            weights: Of the y_i: uniform, as in the paper, or by samples.
            momentum: That of the clients' SGD, to keep the correction out of it, as in NIID-Bench.
        """
        super().__init__()
        self.server_lr, self.weights, self.momentum = server_lr, weights, momentum
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
        clients, x = fed.participants(t), self.model.parameters_row
        before = x.clone()
        fed.send(self.model, clients)  # y_i <- x, and c
        fed.train(clients, t)
        size = fed.sizes(self.model, clients, buffers=False)  # of c_i+ - c_i, and of c
        fed.charge(clients, up=size, down=size)
        merged = fed.merge(clients, into=self.model, weights=self.weights)
        x.copy_(before + self.server_lr * (x - before))
        fed.average(self.changes, merged, into=(change := torch.zeros_like(x)))
        self.c += len(merged) / fed.clients * change
        for k in fed.mine(merged):
            self.controls[k] = self.controls.get(k, 0.0) + self.changes[k]

    @override
    def session_start(self, s: SessionContext) -> None:
        kind = type(s.group.optimizer)
        rates = {rule["lr"] for rule in s.group.optimizer.param_groups}
        found = kind.__name__ if len(rates) == 1 else f"{kind.__name__} of {len(rates)} rates"
        if s.lr is None or not s.group.takes_lr:
            found = f"{found}, whose rate is its own"
        plain = kind is SGD and s.lr is not None and s.group.takes_lr and len(rates) == 1
        require(plain, "model.optimizer", found, "name SGD; (x - y) / (K eta) is its mean gradient")

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        new = 1 - self.momentum if s.step else 1.0  # momentum repeats the rest of it
        gradient.add_(self.c - self.controls.get(s.client, 0.0), alpha=new)

    @override
    def session_end(self, s: SessionContext) -> None:
        assert s.lr is not None, "checked at the start"
        if not s.step:  # a module may skip every batch
            self.changes[s.client] = torch.zeros_like(s.parameters)
            return
        self.changes[s.client] = (s.received - s.parameters) / (s.step * s.lr) - self.c
