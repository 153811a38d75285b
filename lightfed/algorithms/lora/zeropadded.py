"""The zero-padded mean: adapters of unlike rank, where a missing rank counts as zeros.

This is the baseline of all papers on adapters of unlike rank. A rank that few clients have shrinks
in every round, in A and in B, so that its product shrinks by the square of their share.
"""

from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent
from lightfed.algorithms.lora.products import Product


class ZeroPadded(AdapterRule):
    """The mean over all clients of factors that are padded with zeros."""

    takes_late = True

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # A = sum_k p_k pad(A_k), D = sum_k p_k s_k pad(B_k)
        A, D = sent.averaged(sent.p)
        return Merged(applied=Product(D[:, : sent.top], A[: sent.top]), A=A, D=D)
