"""RoLoRA: rounds that train B with A frozen, and rounds that train A with B frozen, in turn.

Chen, Guo, Ju, Dalal, Zhu, Khisti: Robust Federated Finetuning of LLMs via Alternating Optimization
of LoRA. NeurIPS 2025. https://arxiv.org/abs/2502.01755

    t = 0, 2, 4, ...   D <- sum_k p_k s_k B_k,   A frozen
    t = 1, 3, 5, ...   A <- sum_k p_k A_k,       D frozen

The frozen factor is common to all clients, so that D A is the mean of their updates in every round.
B comes first: while B = 0, A has no gradient.

Deviation: clients can have unlike ranks and scales, and are weighted by samples. Missing ranks
count as zeros, with which both means stay exact: sum_k p_k D[:, :r_k] A_k = D A. A rank that few
clients have shrinks by their share.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Factors, Merged, Sent
from lightfed.algorithms.lora.products import Product
from lightfed.api.fleet import Fleet, Weights


class RoLoRA(AdapterRule):
    """Even rounds train and send B, odd rounds A.

    Attributes:
        changed: (2,) the last round whose merge has changed A, and the last that has changed D; -1
            for none.
        served: (N,) the last round in which a client was sent the adapters; -1 for none.
    """

    no_late = "rounds train A and B in turn, and a late update may be of the other factor"
    changed: Tensor
    served: Tensor

    def __init__(
        self, weights: Weights = "samples", adapters: dict[str, str] | None = None
    ) -> None:
        """Set the clients' weights, and the names of the adapters, as for `RankMean`."""
        super().__init__(weights, adapters)
        self.register_buffer("changed", torch.tensor([-1, -1]))

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.register_buffer("served", torch.full((fed.clients,), -1))

    def trained(self, t: int) -> Factors:
        """Return the factor that the sessions of round t train."""
        return "B" if t % 2 == 0 else "A"

    @override
    def frozen(self, t: int) -> Factors:
        return "A" if t % 2 == 0 else "B"

    @override
    def bytes_up(self, fed: Fleet, clients: Sequence[int], t: int) -> Tensor:
        return self.sizes(fed, clients, self.trained(t))

    @override
    def bytes_down(self, fed: Fleet, clients: Sequence[int], t: int) -> Tensor:
        """Return the bytes of what has changed since a client was served last.

        A client that was never served has the initial A by its seed, and B = 0. What round t sends
        does not have the merge of round t: a factor is new to a client if it was changed in the
        round in which the client was served, or later.
        """
        last_served = self.served[clients].cpu()
        never_served_or_last = last_served.clamp(min=0)
        changed_A, changed_D = self.changed.tolist()

        others = self.sizes(fed, clients, "")
        sizes = others.clone()
        last_changes: list[tuple[Factors, int]] = [("A", changed_A), ("B", changed_D)]
        for factor, changed in last_changes:
            is_new = changed >= never_served_or_last
            sizes += is_new * (self.sizes(fed, clients, factor) - others)

        self.served[clients] = t
        return sizes

    @override
    def merge(self, fed: Fleet, clients: Sequence[int], t: int) -> None:
        super().merge(fed, clients, t)
        self.changed["AB".index(self.trained(t))] = t

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        top = sent.top
        A, D = sent.averaged(sent.p)
        if self.trained(sent.round) == "B":
            # D = sum_k p_k s_k pad(B_k)
            return Merged(applied=Product(D[:, :top], sent.old_A[:top]), D=D)

        # A = sum_k p_k pad(A_k)
        return Merged(applied=Product(sent.old_D[:, :top], A[:top]), A=A)
