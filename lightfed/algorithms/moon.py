"""MOON: a client's representations stay near the received model's, and leave its previous one's.

Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021. https://arxiv.org/abs/2103.16257

    L = CE(head(z), y) - mu log [ e^(cos(z, z_g) / tau) / (e^(cos(z, z_g) / tau)
                                                           + sum_p e^(cos(z, z_p) / tau)) ]

z_g is from the received model and z_p from the client's previous ones, all frozen and in evaluation
mode, with their BatchNorm statistics. A client's first session has no contrast. z is what the
network's head takes: the output of its `extractor` or, without one, the input of the linear layer
that gives the logits. The paper's networks end with two linear layers and a ReLU in between, the
projection, below that layer.

As in the released code, clients are weighted by samples, and with more than one previous model a
client's last one counts again for each round that it has missed. Deviation: a pool of three or more
holds the last models; there all but one are the same.
"""

from math import inf
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.shared.one_model import OneModel
from lightfed.api.algorithm import require_argument
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec, blank
from lightfed.models.client_module import ClientModule
from lightfed.models.composites.contrastive import Contrastive
from lightfed.models.composites.split import split


class MOON(OneModel):
    """FedAvg of clients that contrast their representations with their previous model's."""

    last: Tensor  # (N,) round of a client's last session; -1 before

    def __init__(self, mu: float = 1.0, temperature: float = 0.5, pool: int = 1) -> None:
        """Set the contrast.

        Args:
            mu: Its weight in a client's loss.
            temperature: tau.
            pool: Number of previous models that a client keeps.
        """
        super().__init__()
        require_argument(0 <= mu < inf, "mu", mu, "give a weight of 0 or more")
        found, fix = temperature, "give a temperature above 0"
        require_argument(0 < temperature < inf, "temperature", found, fix)
        require_argument(pool >= 1, "pool", pool, "give at least 1")
        self.mu, self.temperature, self.pool = mu, temperature, pool

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        client = ClientModule.of(module, method="MOON")
        network = split(client.net, blank(data, samples=2), key="model.clients")
        client.net = Contrastive(network, mu=self.mu, temperature=self.temperature)

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.previous = fed.keep("previous")  # (models, P), the newest last
        self.register_buffer("last", torch.full((fed.clients,), -1))
        for state in fed.groups:
            state.flops *= 1 + (1 + self.pool) / state.passes  # of the frozen models

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)
        fed.train(clients, t)
        self.last[fed.merge(clients, into=self.model)] = t

    @override
    def session_start(self, s: SessionContext) -> None:
        net: Any = s.module.net
        models, layout = [s.row.floats.clone(), *self._pool(s)], s.group.layout.floats
        views, prefix = [layout.views(model) for model in models], "net.extractor."
        net.frozen = [
            {name.removeprefix(prefix): v for name, v in each.items() if name.startswith(prefix)}
            for each in views
        ]

    def _pool(self, s: SessionContext) -> Tensor:
        """(models, P): the client's model after each of the last rounds, the newest last."""
        if s.client not in self.previous:
            return s.row.floats[None][:0]
        found = self.previous[s.client]
        missed = max(0, s.round - 1 - int(self.last[s.client]))
        return torch.cat([found, found[-1:].expand(min(missed, self.pool), -1)])[-self.pool :]

    @override
    def session_end(self, s: SessionContext) -> None:
        kept = torch.cat([self._pool(s), s.row.floats[None]])
        self.previous[s.client] = kept[-self.pool :]
