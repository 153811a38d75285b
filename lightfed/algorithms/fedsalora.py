"""FedSA-LoRA: clients share A, and each keeps a B of its own.

Guo, Zeng, Wang, Fan, Wang, Qu: Selective Aggregation for Low-Rank Adaptation in Federated Learning.
ICLR 2025. https://arxiv.org/abs/2410.01463

The released code keeps the classifier with the client too on GLUE, and averages it elsewhere.
Deviation: A of unlike ranks is averaged by rank; the paper has one rank.
"""

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import override

from lightfed.aggregation.products import Product
from lightfed.algorithms.shared.adapter_rule import AdapterRule, Merged, Sent
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.state.rows import ModelKind, Rows


class FedSALoRA(AdapterRule):
    """A is averaged; B_k starts at 0, stays with its client, and is never sent."""

    stateful = True
    up = down = "A"
    holds = "the server's A and a B of its own"

    def __init__(self, head: Literal["averaged", "personal"] = "averaged", **rule: Any) -> None:
        """Set what clients share besides A.

        Args:
            head: All other trained tensors: `averaged` as in FedAvg, or `personal`: never sent.
            **rule: `weights` and `adapters` as of `RankMean`.
        """
        super().__init__(**rule)
        self.head = head

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.others = frozenset() if self.head == "personal" else self.others
        self.shared = [*self.others, *(own.a for own in self.adapters[0])]

    @override
    def session_start(self, s: SessionContext) -> None:
        """Nothing: B_k is the client's own."""

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # A[j] = sum_{k: r_k > j} p_k A_k[j] / sum_{k: r_k > j} p_k
        A, _ = sent.averaged(sent.p, by_rank=True)
        applied = Product.sum(sent.p, sent.D, [A[: len(own)] for own in sent.A])
        return Merged(applied, A)  # sum_k p_k s_k B_k A[:r_k], the mean of the clients' models

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind in ("global", "local"):
            return None  # the server has no B
        given = None if kind == "trained" else self.model
        return fed.rows(clients, given=given, tensors=self.shared)
