"""HetLoRA: clients of unlike rank are weighted by the size of their updates, and may drop ranks.

Cho, Liu, Xu, Fahrezi, Joshi: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
Models. EMNLP 2024. https://arxiv.org/abs/2401.06432

No official code was found. Deviations: in each layer a client weighs ||s_k B_k A_k||, its update as
applied; the paper has one scale and one adapter. Other trained tensors are weighted by p_k. A
client has one rank, so it decides over the sum of its layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent
from lightfed.algorithms.lora.products import Product
from lightfed.api.algorithm import require_argument
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.utils.bounds import Share, Weight


class HetLoRA(AdapterRule):
    """The padded mean, with weights ||s_k B_k A_k|| / sum_j ||s_j B_j A_j||."""

    no_kept_optimizer = "momentum would bring back ranks that a client drops"
    kept: Tensor  # (N,) r_k; the configured rank at first

    def __init__(self, gamma: Share = 1.0, decay: Weight = 0.0, **rule: Any) -> None:
        """Set how clients prune themselves.

        Args:
            gamma: Share of its ranks that a client keeps when it prunes itself; 1 for never.
            decay: lambda, the weight in the loss of ||A[q:]|| ||B[:, q:]||, of the other ranks.
            **rule: `weights` and `adapters` as of `RankMean`; weights of other tensors.
        """
        super().__init__(**rule)
        used = decay == 0 or gamma < 1
        require_argument(used, "decay", f"{decay}, and gamma is 1", "give a gamma below 1")
        self.gamma, self.decay = gamma, decay
        if gamma < 1:
            self.no_memory = "a memory would bring back ranks that a client drops"

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        own = [max(super(HetLoRA, self).ranks(fed, k)) for k in range(fed.clients)]
        self.register_buffer("kept", torch.tensor(own))

    @override
    def ranks(self, fed: Fleet, client: int) -> list[int]:
        return [min(rank, int(self.kept[client])) for rank in super().ranks(fed, client)]

    def tails(self, fed: Fleet, client: int, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A[q:] and B[:, q:] by layer."""
        q = self.pruned(client)
        return [(A[q:], B[:, q:]) for A, B in self.factors(fed, client, row)]

    def pruned(self, client: int) -> int:
        """The rank q of a client if it prunes itself."""
        return max(1, int(self.gamma * int(self.kept[client])))

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        if not self.decay:
            return
        # of lambda sum ||A[q:]|| ||B[:, q:]||; that of a norm of 0 is 0
        both = (self.tails(s.fed, s.client, row) for row in (s.parameters, gradient))
        for (A, B), (dA, dB) in zip(*both, strict=True):
            a, b = A.norm(), B.norm()
            dA += self.decay * b * torch.nan_to_num(A / a)
            dB += self.decay * a * torch.nan_to_num(B / b)

    @override
    def before_sending(self, fed: Fleet, clients: Sequence[int]) -> None:
        # r_k <- q if sum ||A[q:]|| ||B[:, q:]|| is less than in what the client received
        shrunk = {}
        for k in fed.mine(finished(fed, clients)) if self.gamma < 1 else ():
            rows = fed.row(k).floats, fed.deployed(k).row(k).floats
            every = (self.tails(fed, k, row) for row in rows)
            now, before = (sum(float(A.norm() * B.norm()) for A, B in tails) for tails in every)
            shrunk[k] = now < before
        for client in [k for k, yes in fed.collect(shrunk).items() if yes]:
            self.kept[client] = self.pruned(client)

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # w_k = ||s_k B_k A_k|| / sum_j ||s_j B_j A_j||; p_k if nobody moved
        norms = [Product(D, A).norm() for A, D in zip(sent.A, sent.D, strict=True)]
        w = [norm / sum(norms) for norm in norms] if sum(norms) > 0 else sent.p
        A, D = sent.averaged(w)  # A = sum_k w_k pad(A_k), D = sum_k w_k s_k pad(B_k)
        return Merged(Product(D[:, : sent.top], A[: sent.top]), A, D)


def finished(fed: Fleet, clients: Sequence[int]) -> list[int]:
    """The clients whose sessions of this round gave a finite update, in time or late."""
    return [k for k in clients if fed.outcomes.usable.get(k, True)]
