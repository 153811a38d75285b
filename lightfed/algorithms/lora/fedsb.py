"""Fed-SB: clients train a small square matrix between two frozen factors, whose mean is exact.

Singhal, Ponkshe, Vartak, Varshney, Vepakomma: Fed-SB: A Silver Bullet for Extreme Communication
Efficiency and Performance in (Private) Federated LoRA Fine-Tuning. 2025.
https://arxiv.org/abs/2502.15436

    W + s_k B[:, :r_k] C_k A[:r_k],   A and B frozen and common
    C <- sum_k p_k s_k pad(C_k),   and so   B C A = sum_k p_k s_k B[:, :r_k] C_k A[:r_k]

A client of rank r sends r^2 numbers for a layer, whatever the layer's size.

Deviations: A and B are drawn, with orthonormal rows and columns, and C starts at 0. The released
code takes all three from the singular vectors of the base's gradients on some samples; then A and B
would have to be sent once. Clients are weighted by samples and can have unlike ranks. A row or a
column of C that no client of the round has keeps its values.
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import Merged, Sent
from lightfed.algorithms.lora.adapters import Adapter
from lightfed.algorithms.lora.cores import Core, CoreRule


class SquareCore(Core):
    """K = C, (r, r)."""

    main = "C"
    packs = True

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.C = nn.Parameter(torch.zeros(adapter.rank, adapter.rank))

    @override
    def times(self, A: Tensor) -> Tensor:
        return self.C @ A

    @override
    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        return {"C": (rank, rank)}


class FedSB(CoreRule):
    """Clients train C_k, and only C_k is sent."""

    takes_late = True

    @override
    def new_core(self, adapter: Adapter) -> Core:
        return SquareCore(adapter)

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # C = sum_k p_k s_k pad(C_k)
        mean = self.mean_core(sent)
        C = sent.old_D.clone()
        C[: sent.top, : sent.top] = mean[: sent.top, : sent.top]
        return self.merged(sent, mean, C)
