"""FLoRA: the clients' updates are added to the base, and adapters start new in every round.

Wang, Shen, He, Sun, Liu, Lyu: FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
Low-Rank Adaptations. NeurIPS 2024. https://arxiv.org/abs/2409.05976

    A_k <- new values,  B_k <- 0,   for every client and round
    W <- W + sum_k p_k s_k B_k A_k,  at all clients

The server sends the stacked factors, whose product is the mean update. The released code multiplies
A by p_k; here it is B, which gives the same product. Clients that took no part get what was added
when they come back.
"""

import torch
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Factors, Merged, Sent, drawn
from lightfed.algorithms.lora.adapters import Adapter
from lightfed.algorithms.lora.products import Product
from lightfed.local.hooks import SessionContext
from lightfed.utils.rng import torch_generator


class FLoRA(AdapterRule):
    """W <- W + sum_k p_k s_k B_k A_k, for all clients."""

    no_late = "the base changes, and an update that is under way is without it"
    no_kept_optimizer = "A is drawn again every round"
    no_memory = "A is drawn again every round, on another base"
    down: Factors = ""
    changes_base = True
    no_server_step = "its step would be one of dense weights"
    holds = "the server's base, without adapters"

    @override
    def session_start(self, s: SessionContext) -> None:
        adapters = self.adapters[s.fed.home_group(s.client)]
        factors = self.factors(s.fed, s.client, s.row.floats)
        for adapter, (A, _) in zip(adapters, factors, strict=True):
            A.copy_(self.fresh(s, adapter))  # B = 0 comes from the server

    def fresh(self, s: SessionContext, own: Adapter) -> torch.Tensor:
        """Return the A with which a session starts, (r_k, in)."""
        purpose = f"adapters/{own.layer}"
        return drawn(own, own.rank, torch_generator(s.fed.seed, purpose, s.round, s.client))

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # W <- W + M, M = sum_k p_k s_k B_k A_k. The server's adapter applies nothing: D = 0.
        return Merged(applied=Product(sent.old_D, sent.old_A), base=sent.mean)
