"""SCAFFOLD: control variates correct the drift of clients with unlike data.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning. ICML 2020. https://arxiv.org/abs/1910.06378. Option II.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightfed import Algorithm, Fleet, ModelKind, Rows, ServerModel
from lightfed.local.hooks import SessionContext


class Scaffold(Algorithm):
    """Clients step along g_i - c_i + c."""

    stateful = True
    model: ServerModel  # x
    c: Tensor

    def __init__(self, server_lr: float = 1.0) -> None:
        super().__init__()
        self.server_lr = server_lr  # eta_g

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout("SCAFFOLD needs one for all")
        self.model = fed.new_model()
        self.register_buffer("c", torch.zeros_like(self.model.parameters_row))
        self.controls = fed.keep("control")  # c_i
        self.changes = fed.keep("change", durable=False)  # c_i+ - c_i

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients, x = fed.participants(t), self.model.parameters_row
        before = x.clone()
        fed.send(self.model, clients)  # y_i <- x, and c
        fed.train(clients, t)
        merged = fed.merge(clients, into=self.model, weights="uniform")
        # x <- x + eta_g / |S| sum_i (y_i - x)
        x.copy_(before + self.server_lr * (x - before))  # BatchNorm statistics are plain means
        change = torch.zeros_like(self.c)
        fed.average(self.changes, merged, into=change)
        self.c += len(merged) / fed.clients * change  # c <- c + 1 / N sum_i (c_i+ - c_i)
        size = 4 * self.model.layout.parameter_numel
        fed.charge(clients, up=size, down=size)

    def control(self, client: int) -> Tensor:
        """c_i, 0 at first."""
        return self.controls[client] if client in self.controls else torch.zeros_like(self.c)

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        gradient += self.c - self.control(s.client)

    @override
    def session_end(self, s: SessionContext) -> None:
        assert s.lr is not None, "SCAFFOLD needs the learning rate of the configuration"
        old = self.control(s.client)
        new = old - self.c + (s.received - s.parameters) / (s.step * s.lr)
        self.controls[s.client], self.changes[s.client] = new, new - old

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind == "aggregated":  # clients hold the server's model
            return fed.server_rows(self.model, clients)
        return super().models(fed, kind, clients)
