"""HetLoRA: clients of unlike rank are weighted by the size of their updates, and may drop ranks.

Cho, Liu, Xu, Fahrezi, Joshi: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
Models. EMNLP 2024. https://arxiv.org/abs/2401.06432

No official code was found. Deviations: in each layer a client weighs ||s_k B_k A_k||, its update as
applied; the paper has one scale and one adapter. Other trained tensors are weighted by p_k. A
client has one rank, so it decides over the sum of its layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.aggregation.adapters import Adapter
from lightfed.aggregation.products import Product
from lightfed.algorithms.shared.low_rank import LowRank, Merged, Sent
from lightfed.api.algorithm import require_argument
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext


class HetLoRA(LowRank):
    """The padded mean, with weights ||s_k B_k A_k|| / sum_j ||s_j B_j A_j||."""

    no_kept_optimizer = "momentum would bring back ranks that a client drops"
    kept: Tensor  # (N,) r_k; the configured rank at first

    def __init__(
        self,
        weights: Weights = "samples",
        gamma: float = 1.0,
        decay: float = 0.0,
        adapters: dict[str, str] | None = None,
    ) -> None:
        """Set how clients prune themselves.

        Args:
            weights: p_k of other tensors than adapters, by the number of samples, or uniform.
            gamma: Share of its ranks that a client keeps when it prunes itself; 1 for never.
            decay: lambda, the weight in the loss of ||A[q:]|| ||B[:, q:]||, of the other ranks.
            adapters: As of `RankMean`.
        """
        super().__init__(weights, adapters)
        require_argument(0 < gamma <= 1, "gamma", gamma, "give a share in (0, 1]")
        fits, fix = decay == 0 or (decay > 0 and gamma < 1), "give 0 or more, and a gamma below 1"
        require_argument(fits, "decay", decay, fix)
        self.gamma, self.decay = gamma, decay

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        ranks = [max(layer[g].rank for layer in self.layers) for g in range(len(fed.groups))]
        own = [ranks[fed.home_group(k)] for k in range(fed.clients)]
        self.register_buffer("kept", torch.tensor(own))

    @override
    def rank(self, fed: Fleet, client: int, layer: Sequence[Adapter]) -> int:
        return min(super().rank(fed, client, layer), int(self.kept[client]))

    def pruned(self, client: int) -> int:
        """q, the rank of a client if it prunes itself."""
        return max(1, int(self.gamma * int(self.kept[client])))

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        if not self.decay:
            return
        # of lambda sum ||A[q:]|| ||B[:, q:]||; that of a norm of 0 is 0
        q = self.pruned(s.client)
        for (A, B), (dA, dB) in zip(
            self.factors(s.fed, s.client, s.parameters),
            self.factors(s.fed, s.client, gradient),
            strict=True,
        ):
            a, b = A[q:].norm(), B[:, q:].norm()
            dA[q:] += self.decay * b * torch.nan_to_num(A[q:] / a)
            dB[:, q:] += self.decay * a * torch.nan_to_num(B[:, q:] / b)

    @override
    def merge_adapters(self, fed: Fleet, clients: Sequence[int]) -> None:
        # r_k <- q if sum ||A[q:]|| ||B[:, q:]|| is less than in what the client received
        shrunk = {}
        for client in fed.mine(clients) if self.gamma < 1 else ():
            received = fed.deployed(client).row(client)
            before = self.tail(fed, client, received.floats)
            shrunk[client] = self.tail(fed, client, fed.row(client).floats) < before
        for client in [k for k, yes in fed.collect(shrunk).items() if yes]:
            self.kept[client] = self.pruned(client)
        super().merge_adapters(fed, clients)

    def tail(self, fed: Fleet, client: int, row: Tensor) -> float:
        """The sum of ||A[q:]|| ||B[:, q:]|| over layers."""
        q, every = self.pruned(client), self.factors(fed, client, row)
        return sum(float(A[q:].norm() * B[:, q:].norm()) for A, B in every)

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # w_k = ||s_k B_k A_k|| / sum_j ||s_j B_j A_j||; p_k if nobody moved
        norms = [Product(D, A).norm() for A, D in zip(sent.A, sent.D, strict=True)]
        w = [norm / sum(norms) for norm in norms] if sum(norms) > 0 else sent.p
        A, D = sent.averaged(w)  # A = sum_k w_k pad(A_k), D = sum_k w_k s_k pad(B_k)
        return Merged(Product(D[:, : sent.top], A[: sent.top]), A, D)
