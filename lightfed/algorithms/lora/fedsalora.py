"""FedSA-LoRA: clients share A, and each keeps a B of its own.

Guo, Zeng, Wang, Fan, Wang, Qu: Selective Aggregation for Low-Rank Adaptation in Federated Learning.
ICLR 2025. https://arxiv.org/abs/2410.01463

    A <- mean of A_k;   B_k stays with client k

The released code also keeps the classifier with the client on GLUE, and averages it elsewhere
(`head`).

Deviation: A of unlike ranks is averaged by rank; the paper has one rank.
"""

from typing import Any, Literal

import lightning.pytorch as L
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Factors, Merged, Sent
from lightfed.algorithms.lora.adapters import adapters_of
from lightfed.algorithms.lora.products import Product
from lightfed.api.fleet import Fleet


class FedSALoRA(AdapterRule):
    """A is averaged; B_k starts at 0, stays with its client, and is never sent."""

    takes_late = True
    up: Factors = "A"
    down: Factors = "A"

    def __init__(self, head: Literal["averaged", "personal"] = "averaged", **rule: Any) -> None:
        """Set what clients share besides A.

        Args:
            head: Whether all other trained tensors are `averaged`, as in FedAvg, or `personal` and
                never sent.
            **rule: `weights` and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        self.head = head

    @override
    def personal(self, module: L.LightningModule) -> set[str]:
        adapters = adapters_of(module, self.names)
        if self.head == "averaged":
            return {adapter.b for adapter in adapters}

        names = {name for name, _ in module.named_parameters()}
        names |= {name for name, _ in module.named_buffers()}
        return names - {adapter.a for adapter in adapters}

    @override
    def take(self, fed: Fleet, client: int, row: Tensor) -> None:
        """Change nothing: A comes with the client's ranks, and B_k is its own."""

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # A[j] = sum_{k: r_k > j} p_k A_k[j] / sum_{k: r_k > j} p_k
        A, _ = sent.averaged(sent.p, by_rank=True)

        # The mean of the clients' models is sum_k p_k s_k B_k A[:r_k].
        cut_to_rank = [A[: len(A_k)] for A_k in sent.A]
        return Merged(applied=Product.sum(sent.p, sent.D, cut_to_rank), A=A)
