"""FlexLoRA: the mean of the clients' products, redistributed to every rank by its singular values.

Bai, Chen, Qian, Yao, Li: Federated Fine-tuning of Large Language Models under Heterogeneous Tasks
and Client Resources. NeurIPS 2024. https://arxiv.org/abs/2402.11505

The product is never formed: its singular values come from the stacked factors. Components that are
zero up to rounding get D = 0 and the initial row of A: the product is the same, and the rank can be
trained. Optimisers of clients start new in every session, because the basis changes in every round.
"""

from typing import Any

import torch
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent, rounded
from lightfed.algorithms.lora.products import Product
from lightfed.api.algorithm import require_argument
from lightfed.utils.bounds import Count


class FlexLoRA(AdapterRule):
    """A client of rank r starts from the r largest components of the mean product."""

    no_memory = "the basis of the factors changes every round"
    no_kept_optimizer = "the basis of the factors changes every round"
    no_server_step = "its step would be one of dense weights"

    def __init__(self, server_rank: Count | None = None, **rule: Any) -> None:
        """Set what the server keeps.

        Args:
            server_rank: Number of components that the server keeps; by default the greatest rank of
                a client, which is all that can be sent.
            **rule: `weights` and `adapters` as of `RankMean`.
        """
        super().__init__(**rule)
        self.server_rank = server_rank

    @override
    def server_ranks(self) -> list[int]:
        greatest = max(super().server_ranks())
        fits = self.server_rank is None or self.server_rank >= greatest
        fix = f"give at least {greatest}, the greatest rank of a client"
        require_argument(fits, "server_rank", self.server_rank, fix)
        return [self.server_rank or rank for rank in super().server_ranks()]

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # M = sum_k p_k s_k B_k A_k = U S V^T; A = V[:, :R]^T, D = U[:, :R] S[:R]
        U, S, V = sent.mean.svd()
        smallest = S[0] * max(len(U), len(V)) * torch.finfo(torch.float32).eps
        kept = min(len(sent.start), int((smallest < S).sum()))
        A, D = sent.start.clone(), torch.zeros_like(sent.old_D)
        A[:kept], D[:, :kept] = rounded(V[:, :kept].T), rounded(U[:, :kept] * S[:kept])
        return Merged(Product(D, A), A, D)
