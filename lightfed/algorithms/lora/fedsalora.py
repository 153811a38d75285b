"""FedSA-LoRA: clients share A, and each keeps a B of its own.

Guo, Zeng, Wang, Fan, Wang, Qu: Selective Aggregation for Low-Rank Adaptation in Federated Learning.
ICLR 2025. https://arxiv.org/abs/2410.01463

The released code keeps the classifier with the client too on GLUE, and averages it elsewhere.
Deviation: A of unlike ranks is averaged by rank; the paper has one rank.
"""

from typing import Any, Literal

import lightning.pytorch as L
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent
from lightfed.algorithms.lora.adapters import adapters_of
from lightfed.algorithms.lora.products import Product
from lightfed.api.fleet import Fleet


class FedSALoRA(AdapterRule):
    """A is averaged; B_k starts at 0, stays with its client, and is never sent."""

    up = down = "A"

    def __init__(self, head: Literal["averaged", "personal"] = "averaged", **rule: Any) -> None:
        """Set what clients share besides A.

        Args:
            head: All other trained tensors: `averaged` as in FedAvg, or `personal`: never sent.
            **rule: `weights` and `adapters` as of `RankMean`.
        """
        super().__init__(**rule)
        self.head = head

    @override
    def personal(self, module: L.LightningModule) -> set[str]:
        adapters = adapters_of(module, self.names)
        if self.head == "averaged":
            return {own.b for own in adapters}
        everything = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        return everything - {own.a for own in adapters}

    @override
    def take(self, fed: Fleet, client: int, row: Tensor) -> None:
        """Nothing: A comes with the client's ranks, and B_k is its own."""

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # A[j] = sum_{k: r_k > j} p_k A_k[j] / sum_{k: r_k > j} p_k
        A, _ = sent.averaged(sent.p, by_rank=True)
        applied = Product.sum(sent.p, sent.D, [A[: len(own)] for own in sent.A])
        return Merged(applied, A)  # sum_k p_k s_k B_k A[:r_k], the mean of the clients' models
