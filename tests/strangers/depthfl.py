"""DepthFL: shallow clients train the first blocks of a deep network, with a classifier after each.

Kim, Yu, Kim, Moon: DepthFL: Depthwise Federated Learning for Heterogeneous Clients. ICLR 2023.
https://openreview.net/forum?id=pf8RIZTMU58

    L = sum_i [ CE(z_i, y) + c_t / (d - 1) sum_{j != i} KL(q_j || softmax(z_i)) ]
    w[e] <- mean of w_k[e] over the clients that hold the tensor e

z_1 .. z_d are the logits of the d classifiers of a client, and q_j = softmax(z_j) a constant. The
released code adds FedDyn as an option, which is left out here.
"""

from collections.abc import Iterable
from math import exp

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed import Algorithm, Fleet
from lightfed.local.hooks import SessionContext


class DepthNet(nn.Module):
    """Blocks, and a classifier after each; the prediction is the mean of their logits."""

    def __init__(self, blocks: Iterable[nn.Module], heads: Iterable[nn.Module]) -> None:
        super().__init__()
        self.levels = nn.ModuleList(map(nn.ModuleList, zip(blocks, heads, strict=True)))
        self.consistency = 0.0  # c_t

    def logits(self, x: Tensor) -> list[Tensor]:
        """(B, C) of every classifier."""
        found = []
        for block, head in self.levels:
            found.append(head(x := block(x)))
        return found

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.logits(x)).mean(0)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.logits(x)
        q = [z_j.softmax(1).detach() + 1e-7 for z_j in z]
        share, losses = self.consistency / max(len(z) - 1, 1), {}
        for i, z_i in enumerate(z):
            others, log = q[:i] + q[i + 1 :], z_i.log_softmax(1)
            kl = [F.kl_div(log, q_j, reduction="batchmean") for q_j in others]
            losses[f"head{i}"] = F.cross_entropy(z_i, y) + share * sum(kl)
        return losses


class DepthFL(Algorithm):
    """Averages every tensor over the clients that hold it; the deepest group comes first."""

    depths = True

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_model()
        for group in range(len(fed.groups)):
            fed.check_nested(self.model, group)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)
        fed.train(clients, t)
        fed.merge(clients, into=self.model, weights="uniform")

    @override
    def session_start(self, s: SessionContext) -> None:
        s.module.net.consistency = exp(-5 * (1 - min(s.round, 300) / 300) ** 2)  # c_t
