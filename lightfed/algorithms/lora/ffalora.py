"""FFA-LoRA: the factor A is frozen at its common start, so that the mean of B is exact.

Sun, Li, Li, Ding: Improving LoRA in Privacy-preserving Federated Learning. ICLR 2024.
https://arxiv.org/abs/2403.12313

    D <- sum_k p_k s_k B_k,  and so  D A = sum_k p_k s_k B_k A

Deviation: clients can have unlike ranks, which the paper does not consider. Their B are padded with
zeros. As A is common, sum_k p_k s_k B_k A[:r_k] = D A. A rank that few clients have shrinks by
their share.
"""

import lightning.pytorch as L
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Factors, Merged, Sent
from lightfed.algorithms.lora.adapters import adapters_of
from lightfed.algorithms.lora.products import Product
from lightfed.models.build import DataSpec


class FFALoRA(AdapterRule):
    """Clients train B only, and only B is sent."""

    takes_late = True
    up: Factors = "B"
    down: Factors = "B"

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        super().prepare_module(module, data)
        for adapter in adapters_of(module, self.names):
            module.get_parameter(adapter.a).requires_grad_(False)

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # D = sum_k p_k s_k pad(B_k)
        _, D = sent.averaged(sent.p)
        return Merged(applied=Product(D[:, : sent.top], sent.start[: sent.top]), D=D)
