"""The zero-padded mean: adapters of unlike rank, where a missing rank counts as zeros.

The baseline of all papers on adapters of unlike rank. The ranks of few clients shrink in every
round, in A and in B, so that their product shrinks by the square of the owners' share.
"""

from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent
from lightfed.algorithms.lora.products import Product


class ZeroPadded(AdapterRule):
    """The mean over all clients of factors that are padded with zeros."""

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # A = sum_k p_k pad(A_k), D = sum_k p_k s_k pad(B_k)
        A, D = sent.averaged(sent.p)
        return Merged(Product(D[:, : sent.top], A[: sent.top]), A, D)
