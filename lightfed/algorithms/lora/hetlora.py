"""HetLoRA: clients of unlike rank are weighted by the size of their updates, and may drop ranks.

Cho, Liu, Xu, Fahrezi, Joshi: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
Models. EMNLP 2024. https://arxiv.org/abs/2401.06432

    loss + lambda ||A[q:]|| ||B[:, q:]||,   q = gamma r_k           rank self-pruning
    r_k <- q  if ||A[q:]|| ||B[:, q:]|| has become smaller
    A <- sum_k w_k pad(A_k),   w_k = ||s_k B_k A_k|| / sum_j ||s_j B_j A_j||,   and B likewise

No official code was found.

Deviations: in each layer the weight of a client is that of its update as it is applied, with its
scale; the paper has one scale and one adapter. Other trained tensors are weighted by p_k. A client
has one rank for all layers, so it decides by the sum over its layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent, finished
from lightfed.algorithms.lora.products import Product
from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.utils.bounds import Share, Weight
from lightfed.utils.errors import UserError


class HetLoRA(AdapterRule):
    """The padded mean, with weights ||s_k B_k A_k|| / sum_j ||s_j B_j A_j||."""

    no_late = "clients weigh by the size of their updates, and may drop ranks under way"
    no_kept_optimizer = "momentum would bring back ranks that a client drops"
    kept: Tensor  # (N,) r_k, at first the configured rank

    def __init__(self, gamma: Share = 1.0, decay: Weight = 0.0, **rule: Any) -> None:
        """Set how clients prune themselves.

        Args:
            gamma: Share of its ranks that a client keeps when it prunes itself; with 1 it never
                does.
            decay: lambda, the weight in the loss of ||A[q:]|| ||B[:, q:]||, of the other ranks.
            **rule: `weights` (of the other tensors) and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        if decay != 0 and gamma == 1:
            raise UserError(f"{KEY}.decay", f"{decay}, and gamma is 1", "give a gamma below 1")

        self.gamma = gamma
        self.decay = decay
        if gamma < 1:
            self.no_memory = "a memory would bring back ranks that a client drops"

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        configured = [max(super(HetLoRA, self).ranks(fed, k)) for k in range(fed.clients)]
        self.register_buffer("kept", torch.tensor(configured))

    @override
    def ranks(self, fed: Fleet, client: int) -> list[int]:
        return [min(rank, int(self.kept[client])) for rank in super().ranks(fed, client)]

    def tails(self, fed: Fleet, client: int, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return views of A[q:] and B[:, q:], by layer, in a row or a gradient (P,)."""
        q = self.pruned(client)
        return [(A[q:], B[:, q:]) for A, B in self.factors(fed, client, row)]

    def pruned(self, client: int) -> int:
        """Return q, the rank of a client if it prunes itself."""
        return max(1, int(self.gamma * int(self.kept[client])))

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        if not self.decay:
            return

        # The gradient of lambda sum ||A[q:]|| ||B[:, q:]||. That of a norm of 0 is taken as 0.
        values = self.tails(s.fed, s.client, s.parameters)
        gradients = self.tails(s.fed, s.client, gradient)
        for (A, B), (dA, dB) in zip(values, gradients, strict=True):
            norm_A = A.norm()
            norm_B = B.norm()
            dA += self.decay * norm_B * torch.nan_to_num(A / norm_A)
            dB += self.decay * norm_A * torch.nan_to_num(B / norm_B)

    @override
    def before_sending(self, fed: Fleet, clients: Sequence[int], t: int) -> None:
        """Let clients prune themselves.

        r_k <- q if sum ||A[q:]|| ||B[:, q:]|| is less than in what the client received.
        """
        has_shrunk = {}
        if self.gamma < 1:
            for client in fed.mine(finished(fed, clients)):
                now = self._size_of_tails(fed, client, fed.row(client).floats)
                received = fed.deployed(client).row(client).floats
                has_shrunk[client] = now < self._size_of_tails(fed, client, received)

        # Every rank needs the clients' ranks. All are collected before the first one changes.
        for client, shrunk in fed.collect(has_shrunk).items():
            if shrunk:
                self.kept[client] = self.pruned(client)

    def _size_of_tails(self, fed: Fleet, client: int, row: Tensor) -> float:
        """Return sum ||A[q:]|| ||B[:, q:]|| over the layers of a row (P,)."""
        return sum(float(A.norm() * B.norm()) for A, B in self.tails(fed, client, row))

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # w_k = ||s_k B_k A_k|| / sum_j ||s_j B_j A_j||; p_k if nobody moved
        norms = [Product(D_k, A_k).norm() for A_k, D_k in zip(sent.A, sent.D, strict=True)]
        w = sent.p
        if sum(norms) > 0:
            w = [norm / sum(norms) for norm in norms]

        # A = sum_k w_k pad(A_k), D = sum_k w_k s_k pad(B_k)
        A, D = sent.averaged(w)
        return Merged(applied=Product(D[:, : sent.top], A[: sent.top]), A=A, D=D)
