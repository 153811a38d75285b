"""DepthFL: shallow clients train the first blocks of a deep network, with a classifier after each.

Kim, Yu, Kim, Moon: DepthFL: Depthwise Federated Learning for Heterogeneous Clients. ICLR 2023.
https://openreview.net/forum?id=pf8RIZTMU58

    L = sum_i [ CE(z_i, y) + c_t / (d - 1) sum_{j != i} KL(q_j || softmax(z_i)) ]
    a[e] <- mean of w_k[e] over the m_e clients that hold the tensor e

z_1 .. z_d are the logits of the d classifiers of a client, and q_j = softmax(z_j) is a constant. As
in the first author's code, FedDyn corrects the drift of clients and server:

    grad L + alpha (w - w_t) - g_k,            g_k <- g_k - alpha (w_k - w_t)
    h[e] <- h[e] - alpha m_e / N (a - w_t)[e],   w_{t+1} = a - h / alpha

BatchNorm statistics are plain means. The first group is the deepest.
"""

from math import exp

import lightning.pytorch as L
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.depth.networks import DepthNet
from lightfed.algorithms.one_model import OneModel
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec
from lightfed.models.client_module import ClientModule
from lightfed.utils.bounds import Weight
from lightfed.utils.errors import UserError


class DepthFL(OneModel):
    """Averages every tensor over the clients that hold it; the deepest group comes first."""

    depths = True
    side_by_side = True
    no_server_step = "DepthFL has a step of its own, of its memories"
    h: Tensor

    def __init__(self, alpha: Weight = 0.1, distil: bool = True, deepest: bool = False) -> None:
        """Set what clients minimise.

        Args:
            alpha: Of FedDyn; with 0 it is left out, and clients keep nothing.
            distil: Classifiers learn from each other.
            deepest: Only a client's last classifier has a loss, as in InclusiveFL.
        """
        super().__init__()
        self.alpha, self.distil, self.deepest = alpha, distil, deepest
        self.stateful = alpha > 0  # clients keep g_k
        if alpha:
            self.no_memory = "its clients have such a memory, unless alpha is 0"

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        net = ClientModule.of(module, method="DepthFL").net
        if not isinstance(net, DepthNet):
            found = f"{type(net).__name__}, which has no classifier after each block"
            raise UserError("model.clients", found, "use DepthConv, or a DepthNet of your own")
        net.deepest = self.deepest

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_model()
        for group in range(len(fed.groups)):
            fed.check_nested(self.model, group)
        self.register_buffer("h", torch.zeros_like(self.model.parameters_row))
        if self.alpha:
            self.corrections = fed.keep("correction", with_server=True)  # g_k
        self.changes = fed.keep("change", durable=False)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients, w = fed.participants(t), self.model.parameters_row
        before = w.clone()
        fed.send(self.model, clients)
        fed.train(clients, t)
        merged = fed.merge(clients, into=self.model, weights="uniform")
        if self.alpha:
            held = torch.zeros_like(self.model.floats)  # m_e
            views = self.model.layout.floats.views(held)
            for entry in (e for k in merged for e in fed.state(k).layout.floats):
                views[entry.name] += 1
            held = held[: len(w)]
            self.h -= self.alpha / fed.clients * held * (w - before)
            w -= (held > 0) * self.h / self.alpha
            for k in fed.mine(merged):
                self.corrections[k] = self.corrections.get(k, 0.0) + self.changes[k]

    @override
    def session_start(self, s: SessionContext) -> None:
        c = exp(-5 * (1 - min(s.round, 300) / 300) ** 2) if self.distil else 0.0
        s.module.get_buffer("net.consistency").fill_(c)

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        if self.alpha:
            gradient += self.alpha * (s.parameters - s.received)
            gradient -= self.corrections.get(s.client, 0.0)

    @override
    def session_end(self, s: SessionContext) -> None:
        if self.alpha:
            self.changes[s.client] = self.alpha * (s.received - s.parameters)
