"""FedMomentum: adapters get the largest components of the mean product, the base gets the others.

Yan, Hua, Wang, Zhang, Wu, Song, Guan: FedMomentum: Preserving LoRA Training Momentum in Federated
Fine-Tuning. 2026. https://arxiv.org/abs/2603.08014

    M = sum_k p_k s_k B_k A_k = U S V^T
    q = the least number of components with  sum_{i < q} S_i^2 >= energy * sum_i S_i^2
    A[i] = sqrt(S_i / s) V_i^T,   D[:, i] = sqrt(S_i s) U_i,                 i < min(R, q)
    W <- W + sum_{R <= i < q} S_i U_i V_i^T,   for all clients

These are the equations as a library that cites the paper has them (FedLLM-Factory), but for the
scale s. Both factors of a client get the same share sqrt(S_i) of a component. Components beyond q
are dropped.

Deviations: clients can have unlike ranks and scales; s = sum_k p_k s_k. A client of lower rank
starts from the new W and its own ranks. It lacks the others. Ranks without a component get D = 0
and the initial row of A. The singular values are exact, not those of a randomized method.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent, rounded
from lightfed.algorithms.lora.products import Product, components_of_energy
from lightfed.api.fleet import Fleet
from lightfed.utils.bounds import Fraction


class FedMomentum(AdapterRule):
    """W + D A = W_old + M, but for the components beyond the energy."""

    no_late = "the base changes, and an update that is under way is without it"
    changes_base = True
    no_memory = "the base changes, and what a client remembers is without it"
    no_kept_optimizer = "the basis of the factors changes every round"
    no_server_step = "its step would be one of dense weights"

    def __init__(self, energy: Fraction = 0.9999, **rule: Any) -> None:
        """Set which components are dropped.

        Args:
            energy: Share of the sum of squares of all singular values that is kept. With 1,
                rounding would decide what is.
            **rule: `weights` and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        self.energy = energy

    @override
    def most_added(self, fed: Fleet, clients: Sequence[int]) -> Tensor:
        # How many components there are is known only after training.
        fed.only_counts({}, masked=True)

        ranks = torch.tensor([self.ranks(fed, client) for client in clients]).sum(0)
        smaller_sides = [min(adapter.inputs, adapter.outputs) for adapter in self.adapters[0]]
        components = torch.minimum(ranks, torch.tensor(smaller_sides))
        return (components - torch.tensor([len(start) for start in self.starts])).clamp(min=0)

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        U, S, V = sent.mean.svd()
        q = components_of_energy(S, self.energy)
        R = len(sent.start)
        n = min(R, q)
        s = sent.mean_scale

        A = sent.start.clone()
        D = torch.zeros_like(sent.old_D)
        A[:n] = rounded((S[:n] / s).sqrt()[:, None] * V[:, :n].T)
        D[:, :n] = rounded((S[:n] * s).sqrt() * U[:, :n])

        # W <- W + sum_{R <= i < q} S_i U_i V_i^T
        residual = Product(U[:, R:q] * S[R:q], V[:, R:q].T)
        return Merged(applied=Product(D, A), A=A, D=D, base=residual, kept=q)
