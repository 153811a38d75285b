"""FedAPEN: an ensemble of a private and a shared network, weighed by what suits the client.

Qin, Deng, Zhao, Yan: FedAPEN: Personalized Cross-silo Federated Learning with Adaptability to
Statistical Heterogeneity. KDD 2023. https://doi.org/10.1145/3580305.3599344

Both networks learn from the labels, from each other and from their ensemble; the shared one travels
and is averaged without weights. After every aggregation a participant gets the new shared network
and learns its share, the private network's weight in the ensemble, on samples that it never trains
on; it trains with that share in its next session, as the released code does. The ensemble is
evaluated, with the shared network that the client has at the time.

A deviation: the share is learned from logits that are computed once, and not in every pass, with
the same result, as no network moves.
"""

import torch
from torch import nn
from typing_extensions import override

from lightfed.core.beside import Beside, NetworkFactory
from lightfed.core.client import ClientModule
from lightfed.core.cohort import DataSpec
from lightfed.core.fleet import Fleet, Weights
from lightfed.models import mutual
from lightfed.utils.errors import UserError

_KEY = "model.algorithm.init_args"
_SHARE = "net.share"


class FedAPEN(Beside):
    """e = lambda p + (1 - lambda) s;  L_p = CE(p) + KL(s || p) + CE(e), and likewise L_s."""

    moments = ("aggregated",)  # the shared network comes back before the round is over
    holds = "the ensemble of its private network and the shared one"
    current: torch.Tensor  # (clients,) bool: who has the server's present shared network

    def __init__(
        self,
        shared: NetworkFactory,
        hold_out: float = 0.05,
        share_lr: float = 1e-3,
        passes: int = 10,
        weights: Weights = "uniform",
    ) -> None:
        """The ensemble.

        Args:
            shared: s, the network that travels.
            hold_out: Share of a client's training samples on which it learns lambda and does not
                train, at least one sample.
            share_lr: Learning rate of lambda.
            passes: Over the hold-out, after every aggregation; 0 leaves lambda at one half.
            weights: Of the participants in the mean: uniform, or by samples.
        """
        super().__init__(shared, weights)
        if not 0 < hold_out < 1:
            raise UserError(f"{_KEY}.hold_out", str(hold_out), "give a share such as 0.05")
        if not 0 < share_lr < float("inf"):
            raise UserError(f"{_KEY}.share_lr", str(share_lr), "give a rate above 0")
        if passes < 0:
            raise UserError(f"{_KEY}.passes", str(passes), "give 0 or more")
        self.hold_out = hold_out
        self.share_lr = share_lr
        self.passes = passes

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        return mutual.FedAPEN(private, shared)

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.register_buffer("current", torch.zeros(fed.clients, dtype=torch.bool))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        current = self.current.tolist()
        fed.send(self.model, [k for k in clients if not current[k]])  # s_k <- s
        fed.train(clients, t)  # with the lambda of the last time
        fed.merge(clients, into=self.model, weights=self.weights)  # s <- mean of s_k
        fed.send(self.model, clients)
        self.current.fill_(False)
        self.current[clients] = True
        for client in clients:
            self._learn(fed, client)

    def _learn(self, fed: Fleet, client: int) -> None:
        """Learning for adaptability, with the new shared network."""
        forward = fed.state(client).flops * fed.data.num_held_out(client)
        fed.ledger.computed(client, forward if self.passes else 0.0)
        for _ in fed.mine([client]):
            module = fed.bind(client)
            assert isinstance(module, ClientModule)
            assert isinstance(module.net, mutual.FedAPEN)
            batches = fed.data.held_out_batches(client)
            module.net.learn_share(batches, lr=self.share_lr, passes=self.passes)
            row = fed.row(client).floats  # the module's, unless that is a copy on the device
            fed.state(client).layout.floats.views(row)[_SHARE].copy_(module.net.share)
