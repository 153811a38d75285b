"""DepthFL: shallow clients train the first blocks of a deep network, with a classifier after each.

Kim, Yu, Kim, Moon: DepthFL: Depthwise Federated Learning for Heterogeneous Clients. ICLR 2023.
https://openreview.net/forum?id=pf8RIZTMU58

    L = sum_i [ CE(z_i, y) + c_t / (d - 1) sum_{j != i} KL(q_j || softmax(z_i)) ]
    a[e] <- mean of w_k[e] over the m_e clients that hold the tensor e

z_1 .. z_d are the logits of the d classifiers of a client, and q_j = softmax(z_j) is a constant.

As in the first author's code, FedDyn corrects the drift of clients and server:

    grad L + alpha (w - w_t) - g_k,            g_k <- g_k - alpha (w_k - w_t)
    h[e] <- h[e] - alpha m_e / N (a - w_t)[e],   w_{t+1} = a - h / alpha

BatchNorm statistics are plain means. The first group is the deepest. The networks are in
`networks.py`.
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
    """Averages every tensor over the clients that hold it; the deepest group comes first.

    Attributes:
        h: (P,) the server's memory of its steps, in the deepest model.
    """

    depths = True
    side_by_side = True
    takes_late = True
    no_server_step = "DepthFL has a step of its own, of its memories"
    h: Tensor

    def __init__(self, alpha: Weight = 0.1, distil: bool = True, deepest: bool = False) -> None:
        """Set what clients minimize.

        Args:
            alpha: The weight of FedDyn's correction; with 0 there is none, and clients keep
                nothing.
            distil: Classifiers learn from each other.
            deepest: Only a client's last classifier has a loss, as in InclusiveFL.
        """
        super().__init__()
        self.alpha = alpha
        self.distil = distil
        self.deepest = deepest
        self.stateful = alpha > 0  # clients keep g_k
        if alpha:
            self.no_memory = "its clients have such a memory, unless alpha is 0"

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        net = ClientModule.of(module, method="DepthFL").net
        if not isinstance(net, DepthNet):
            raise UserError(
                key="model.clients",
                found=f"{type(net).__name__}, which has no classifier after each block",
                fix="use DepthConv, or a DepthNet of your own",
            )
        net.deepest = self.deepest

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_model()
        for group in range(len(fed.groups)):
            fed.check_nested(self.model, group)
        self.register_buffer("h", torch.zeros_like(self.model.parameters_row))
        if self.alpha:
            self.corrections = fed.keep("correction", with_server=True)  # g_k
        self.changes = fed.keep("change", durable=False)  # -alpha (w_k - w_t)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        w = self.model.parameters_row
        before = w.clone()  # w_t

        clients = fed.participants(t)
        fed.send(self.model, clients)
        fed.train(clients, t)
        merged = fed.merge(clients, into=self.model, weights="uniform")  # a
        if not self.alpha:
            return

        m = self._holders(fed, merged)[: len(w)]
        # h[e] <- h[e] - alpha m_e / N (a - w_t)[e]
        if fed.keeps_late:
            # In the mean of the models late ones weigh less. h stays the mean of all g_k.
            mean_change = torch.zeros_like(w)
            fed.average(self._padded(fed, merged), merged, into=mean_change, in_full=True)
            self.h += len(merged) / len(fed.seen) * mean_change
        else:
            self.h -= self.alpha / len(fed.seen) * m * (w - before)
        # w_{t+1} = a - h / alpha, where some client of this round holds the tensor
        w -= (m > 0) * self.h / self.alpha
        for k in fed.mine(merged):
            self.corrections[k] = self.corrections.get(k, 0.0) + self.changes[k]

    def _holders(self, fed: Fleet, clients: list[int]) -> Tensor:
        """Return m_e of every element of the server's model, (P,): how many clients hold it."""
        holders = torch.zeros_like(self.model.floats)
        views = self.model.layout.floats.views(holders)
        for k in clients:
            for entry in fed.state(k).layout.floats:
                views[entry.name] += 1
        return holders

    def _padded(self, fed: Fleet, clients: list[int]) -> dict[int, Tensor]:
        """Return -alpha (w_k - w_t) of this rank's clients, (P,) each; 0 beyond their layers."""
        padded = {}
        for k in fed.mine(clients):
            layout = fed.state(k).layout
            of_client = torch.zeros(layout.floats.size, device=fed.device)
            of_client[: layout.parameter_size] = self.changes[k]

            in_server = torch.zeros_like(self.model.floats)
            views = self.model.layout.floats.views(in_server)
            for name, change in layout.floats.views(of_client).items():
                views[name].copy_(change)
            padded[k] = in_server[: len(self.h)]
        return padded

    @override
    def session_start(self, s: SessionContext) -> None:
        # c_t rises within 300 rounds, as in the first author's code.
        consistency = 0.0
        if self.distil:
            progress = min(s.round, 300) / 300
            consistency = exp(-5 * (1 - progress) ** 2)
        s.module.get_buffer("net.consistency").fill_(consistency)

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        if self.alpha:
            gradient += self.alpha * (s.parameters - s.received)
            gradient -= self.corrections.get(s.client, 0.0)

    @override
    def session_end(self, s: SessionContext) -> None:
        if self.alpha:
            self.changes[s.client] = self.alpha * (s.received - s.parameters)
