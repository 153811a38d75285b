"""FlexLoRA: the mean of the clients' products, redistributed to every rank by its singular values.

Bai, Chen, Qian, Yao, Li: Federated Fine-tuning of Large Language Models under Heterogeneous Tasks
and Client Resources. NeurIPS 2024. https://arxiv.org/abs/2402.11505

    M = sum_k p_k s_k B_k A_k = U S V^T
    A <- V[:, :R]^T,   D <- U[:, :R] S[:R];   client k gets the first r_k of these components

With `energy` below 1 a layer keeps the least number q of components with

    sum_{i < q} S_i^2 >= energy * sum_i S_i^2

in the manner of FLoRIST (Ramesh, Dass: FLoRIST: Singular Value Thresholding for Efficient and
Accurate Federated Fine-Tuning of Large Language Models. 2025. https://arxiv.org/abs/2506.09199),
of which only the abstract was read: that its threshold is on squares is our reading. FLoRIST gives
all clients one adapter of that rank; here a client has its own rank, of which the ranks beyond q
start new and are not sent.

The product M is never formed: its singular values come from the stacked factors. Components that
are zero up to rounding get D = 0 and the initial row of A, so that the product is the same and the
rank can be trained. The clients' optimizers start new in every session, because the basis changes
in every round.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent, rounded
from lightfed.algorithms.lora.products import Product, components_of_energy, largest_components
from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet
from lightfed.utils.bounds import Count, Share
from lightfed.utils.errors import UserError


class FlexLoRA(AdapterRule):
    """A client of rank r starts from the r largest components of the mean product.

    Attributes:
        kept: (L,) how many ranks of a layer are sent at most: the components that it has kept, and
            all before the first merge. Only with an energy below 1.
    """

    no_late = "the basis of the factors changes every round"
    no_memory = "the basis of the factors changes every round"
    no_kept_optimizer = "the basis of the factors changes every round"
    no_server_step = "its step would be one of dense weights"

    kept: Tensor

    def __init__(self, server_rank: Count | None = None, energy: Share = 1.0, **rule: Any) -> None:
        """Set what the server keeps.

        Args:
            server_rank: Number of components that the server keeps; by default the greatest rank of
                a client, which is all that can be sent.
            energy: Share of the sum of squares of all singular values that the server keeps; with 1
                it keeps all components that are not rounding errors.
            **rule: `weights` and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        self.server_rank = server_rank
        self.energy = energy

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        if self.energy < 1:
            self.register_buffer("kept", torch.tensor([len(start) for start in self.starts]))

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
    def bytes_down(self, fed: Fleet, clients: Sequence[int], t: int) -> Tensor:
        if self.energy == 1:
            return super().bytes_down(fed, clients, t)

        # How many components are kept is known only after training.
        fed.only_counts({}, masked=True)
        return self.sizes(fed, clients, self.down, most=self.kept)

    @override
    def layer_kept(self, layer: int, components: int) -> None:
        if self.energy < 1:
            self.kept[layer] = components

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        U, S, V = sent.mean.svd()
        q = len(S)
        if self.energy < 1:
            q = components_of_energy(S, self.energy)

        A, D = largest_components(U, S, V, sent.start, q)
        A = rounded(A)
        D = rounded(D)
        return Merged(applied=Product(D, A), A=A, D=D, kept=min(q, len(A)))
