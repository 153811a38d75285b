"""The mean by rank (RBLA): each rank of an adapter is averaged over the clients that have it.

Tavallaie, Chen, et al.: RBLA: Rank-Based-LoRA-Aggregation for Fine-tuning Heterogeneous Models in
FLaaS. 2024. https://arxiv.org/abs/2408.08699
"""

from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent
from lightfed.algorithms.lora.products import Product


class RankMean(AdapterRule):
    """A rank is the mean over the clients that have it; adapters are kept from round to round."""

    takes_late = True

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # A[j] = sum_{k: r_k > j} p_k A_k[j] / sum_{k: r_k > j} p_k, and likewise the columns of D
        A, D = sent.averaged(sent.p, by_rank=True)
        return Merged(applied=Product(D[:, : sent.top], A[: sent.top]), A=A, D=D)
