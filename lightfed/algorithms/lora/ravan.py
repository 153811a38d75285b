"""RAVAN: clients train several small heads between frozen factors, each with a scale of its own.

Raje, Askin, Jhunjhunwala, Joshi: Ravan: Multi-Head Low-Rank Adaptation for Federated Fine-Tuning.
NeurIPS 2025. https://arxiv.org/abs/2506.05568

    W + s_k sum_i sigma_ik B_i H_ik A_i,   A_i and B_i frozen and common
    H_i <- sum_k p_k s_k sigma_ik H_ik,   sigma_i <- 1

Head i is square, of `head_rank` ranks. A client of rank r trains the first r / head_rank heads with
their sigma, and sends sigma H. The mean is exact: it is that of Fed-SB with a block diagonal core.

Decided here: the factors of all heads together are orthonormal, A has orthonormal rows and B
orthonormal columns. Clients are weighted by samples. A client of lower rank has fewer heads, and a
head that it lacks counts as 0. A head that no client of the round has keeps its values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import Merged, Sent
from lightfed.algorithms.lora.adapters import Adapter
from lightfed.algorithms.lora.cores import Core, CoreAdapter, CoreRule
from lightfed.api.fleet import Fleet
from lightfed.utils.bounds import Count
from lightfed.utils.errors import UserError


class Heads(Core):
    """K has the heads sigma_i H_i on its diagonal.

    Attributes:
        H: The heads side by side, (q, r): head i has the columns i q to (i + 1) q.
        sigma: Their scales, (r / q,).
    """

    main = "H"
    packs = True

    def __init__(self, adapter: Adapter, head_rank: int) -> None:
        super().__init__(adapter)
        self.head_rank = head_rank
        self.H = nn.Parameter(torch.zeros(head_rank, adapter.rank))
        self.sigma = nn.Parameter(torch.ones(adapter.rank // head_rank))

    @override
    def times(self, A: Tensor) -> Tensor:
        heads = self.H.unflatten(1, (-1, self.head_rank)) * self.sigma[:, None]  # (q, heads, q)
        A_of_heads = A.unflatten(0, (-1, self.head_rank))  # (heads, q, in)
        return torch.einsum("ahb,hbn->han", heads, A_of_heads).flatten(0, 1)

    @override
    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        return {"H": (self.head_rank, rank), "sigma": (rank // self.head_rank,)}


class RAVAN(CoreRule):
    """Clients train the heads H_ik and their scales sigma_ik, and send the products."""

    no_late = "the scales of the heads become a part of them every round"
    no_kept_optimizer = "the scales of the heads become a part of them every round"
    no_memory = "the scales of the heads become a part of them every round"

    def __init__(self, head_rank: Count = 4, **rule: Any) -> None:
        """Set the size of a head.

        Args:
            head_rank: q, the rank of a head. The rank of a client has to be a multiple of it.
            **rule: `weights` and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        self.head_rank = head_rank

    @override
    def check_rank(self, adapter: Adapter) -> None:
        super().check_rank(adapter)
        if adapter.rank % self.head_rank:
            raise UserError(
                "model.clients",
                f"rank {adapter.rank} in {adapter.layer}, of heads of rank {self.head_rank}",
                "give a multiple of it, or another head_rank",
            )

    @override
    def new_core(self, adapter: Adapter) -> Core:
        return Heads(adapter, self.head_rank)

    def sigmas(self, fed: Fleet, client: int, row: Tensor) -> list[Tensor]:
        """Return views of the scales (r / q,), by layer, in a client's row (P,)."""
        tensors = fed.state(client).layout.floats.views(row)
        sigmas = []
        for adapter in self.adapters[fed.home_group(client)]:
            assert isinstance(adapter, CoreAdapter)
            sigmas.append(tensors[f"{adapter.path}.sigma"])
        return sigmas

    @override
    def take(self, fed: Fleet, client: int, row: Tensor) -> None:
        """Set H_ik = H_i / s_k and sigma_ik = 1."""
        super().take(fed, client, row)
        for sigma in self.sigmas(fed, client, row):
            sigma.fill_(1)

    @override
    def cores(self, fed: Fleet, client: int, row: Tensor) -> list[Tensor]:
        cores = []
        factors = self.factors(fed, client, row)
        for (_, H), sigma in zip(factors, self.sigmas(fed, client, row), strict=True):
            scaled = H * sigma.repeat_interleave(self.head_rank)  # sigma_ik H_ik
            cores.append(torch.block_diag(*scaled.split(self.head_rank, 1)))
        return cores

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # H_i = sum_k p_k s_k sigma_ik H_ik
        mean = self.mean_core(sent)
        H = sent.old_D.clone()
        H[:, : sent.top] = self._heads_of(mean)[:, : sent.top]
        return self.merged(sent, mean, H)

    def _heads_of(self, core: Tensor) -> Tensor:
        """Return the blocks on the diagonal of a core (R, R), side by side (q, R)."""
        q = self.head_rank
        starts: Sequence[int] = range(0, len(core), q)
        return torch.cat([core[start : start + q, start : start + q] for start in starts], 1)
