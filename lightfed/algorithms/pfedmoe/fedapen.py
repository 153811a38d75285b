"""FedAPEN: an ensemble of a private and a shared network, with weights learned by each client.

Qin, Deng, Zhao, Yan: FedAPEN: Personalized Cross-silo Federated Learning with Adaptability to
Statistical Heterogeneity. KDD 2023. https://doi.org/10.1145/3580305.3599344

    e = lambda p + (1 - lambda) s
    L_p = CE(p) + KL(s || p) + CE(e),   and likewise L_s

Both networks, the private p and the shared s, learn from the labels, from each other and from their
ensemble e. The shared network is sent, and averaged without weights. A participant receives it and
learns its share lambda, the private network's weight in the ensemble, on samples that it never
trains on. Then it trains with that share. Evaluation uses the ensemble with the client's current
shared network, the one that it has trained.

The released code learns the share after the aggregation (`learn: aggregated`), trains with it in
the next session, and tests with the new shared network. That costs one more download for a
participant that skips the next round, since its copy is then outdated.

Deviation: the share is learned from logits that are computed once instead of in every pass. The
result is the same, because the networks do not change.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from typing_extensions import override

from lightfed.algorithms.pfedmoe import mutual
from lightfed.algorithms.pfedmoe.personal_shared import NetworkFactory, PersonalShared
from lightfed.api.fleet import Fleet, Weights
from lightfed.models.build import DataSpec
from lightfed.models.client_module import ClientModule
from lightfed.utils.bounds import Fraction, Number, Weight

_SHARE = "net.share"


class FedAPEN(PersonalShared):
    """e = lambda p + (1 - lambda) s;  L_p = CE(p) + KL(s || p) + CE(e), and likewise L_s."""

    holds = "the ensemble of its private network and the shared one"
    takes_late = True
    # (clients,) bool: which clients have downloaded the server's current shared network.
    current: torch.Tensor

    def __init__(
        self,
        shared: NetworkFactory,
        hold_out: Fraction = 0.05,
        share_lr: Weight = 1e-3,
        passes: Number = 10,
        weights: Weights = "uniform",
        learn: Literal["received", "aggregated"] = "received",
    ) -> None:
        """Set the ensemble.

        Args:
            shared: s, the network that is sent.
            hold_out: Share of a client's training samples, at least one, on which it learns lambda
                and does not train.
            share_lr: Learning rate of lambda.
            passes: Passes over these samples per round; 0 keeps lambda at one half.
            weights: Weights of the participants in the mean: uniform, or by samples.
            learn: Whether a participant learns lambda with the shared network that it receives,
                before it trains; or, as in the released code, with the aggregated one, which it
                downloads for that.
        """
        super().__init__(shared, weights)
        self.hold_out = hold_out
        self.share_lr = share_lr
        self.passes = passes
        self.learn = learn
        if learn == "aggregated":
            self.moments = ("aggregated",)  # the shared network is back before the round is over

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
        is_current = self.current.tolist()
        outdated = [client for client in clients if not is_current[client]]
        fed.send(self.model, outdated)  # s_k <- s

        if self.learn == "received":
            self._learn_shares(fed, clients)

        fed.train(clients, t)  # with the last lambda
        fed.merge(clients, into=self.model, weights=self.weights)  # s <- mean of s_k

        if self.learn == "aggregated":
            fed.send(self.model, clients)
            self.current.fill_(False)
            self.current[clients] = True
            self._learn_shares(fed, clients)

    def _learn_shares(self, fed: Fleet, clients: Sequence[int]) -> None:
        """Let clients learn lambda with the shared network that they have."""
        for client in clients:
            forward = fed.state(client).flops * fed.data.num_held_out(client)
            fed.ledger.computed(client, forward if self.passes else 0.0)
        for client in fed.mine(clients):
            module = fed.bind(client)
            assert isinstance(module, ClientModule)
            assert isinstance(module.net, mutual.FedAPEN)
            batches = fed.data.held_out_batches(client)
            module.net.learn_share(batches, lr=self.share_lr, passes=self.passes)

            # The module may have been bound to a copy of the row on the device.
            row = fed.row(client).floats
            views = fed.state(client).layout.floats.views(row)
            views[_SHARE].copy_(module.net.share)
