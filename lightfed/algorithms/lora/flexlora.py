"""FlexLoRA: the mean of the clients' products, redistributed to every rank by its singular values.

Bai, Chen, Qian, Yao, Li: Federated Fine-tuning of Large Language Models under Heterogeneous Tasks
and Client Resources. NeurIPS 2024. https://arxiv.org/abs/2402.11505

    M = sum_k p_k s_k B_k A_k = U S V^T
    A <- V[:, :R]^T,   D <- U[:, :R] S[:R];   client k gets the first r_k of these components

The product M is never formed: its singular values come from the stacked factors. Components that
are zero up to rounding get D = 0 and the initial row of A, so that the product is the same and the
rank can be trained. The clients' optimizers start new in every session, because the basis changes
in every round.
"""

from typing import Any

import torch
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent, rounded
from lightfed.algorithms.lora.products import Product
from lightfed.api.algorithm import KEY
from lightfed.utils.bounds import Count
from lightfed.utils.errors import UserError


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
            **rule: `weights` and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        self.server_rank = server_rank

    @override
    def server_ranks(self) -> list[int]:
        ranks_of_clients = super().server_ranks()
        if self.server_rank is None:
            return ranks_of_clients

        greatest = max(ranks_of_clients)
        if self.server_rank < greatest:
            raise UserError(
                f"{KEY}.server_rank",
                str(self.server_rank),
                f"give at least {greatest}, the greatest rank of a client",
            )
        return [self.server_rank] * len(ranks_of_clients)

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        U, S, V = sent.mean.svd()

        # Below this, a singular value is a rounding error of the float32 factors.
        threshold = S[0] * max(len(U), len(V)) * torch.finfo(torch.float32).eps
        R = min(len(sent.start), int((threshold < S).sum()))

        A = sent.start.clone()
        D = torch.zeros_like(sent.old_D)
        A[:R] = rounded(V[:, :R].T)
        D[:, :R] = rounded(U[:, :R] * S[:R])
        return Merged(applied=Product(D, A), A=A, D=D)
