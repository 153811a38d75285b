"""FedSVD: clients train B, and the server turns A to the singular vectors of the product.

Lee, Park, Lee, Wagner, Seong, Bocklet, Lee, Hwang: FedSVD: Adaptive Orthogonalization for Private
Federated Learning with LoRA. NeurIPS 2025. https://arxiv.org/abs/2505.12805

    D <- sum_k p_k s_k B_k,   with A frozen in all sessions
    D A = U S V^T;   A <- V[:, :R]^T,   D <- U[:, :R] S[:R]      after every `period` rounds

A is common to all clients, so that D A is the mean of their updates, and the decomposition does
not change it: D A has at most R components.

Deviations: clients can have unlike ranks and scales, as in `FFALoRA`; one of rank r gets the r
largest components. There is no noise for privacy. Components that are zero up to rounding get D = 0
and the initial row of A. The first A is the common initial one, whose rows are not orthonormal.
The released code (seanie12/fed-svd) also freezes the classifier; here other trained tensors are
averaged, as in FedAvg.
"""

from typing import Any

import lightning.pytorch as L
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Factors, Merged, Sent, rounded
from lightfed.algorithms.lora.adapters import adapters_of
from lightfed.algorithms.lora.products import Product, largest_components
from lightfed.models.build import DataSpec
from lightfed.utils.bounds import Count


class FedSVD(AdapterRule):
    """B is trained and sent up; A and B are sent down."""

    no_late = "the basis of the factors changes every round"
    up: Factors = "B"
    no_memory = "the basis of the factors changes every round"
    no_kept_optimizer = "the basis of the factors changes every round"
    no_server_step = "the basis of the factors changes every round"

    def __init__(self, period: Count = 1, **rule: Any) -> None:
        """Set how often A changes.

        Args:
            period: Number of rounds from one decomposition to the next.
            **rule: `weights` and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        self.period = period

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        super().prepare_module(module, data)
        names = []
        for adapter in adapters_of(module, self.names):
            module.get_parameter(adapter.a).requires_grad_(False)
            names.append(adapter.a)

        # Frozen in sessions, but no part of the base, which never changes: the server writes A
        # into the clients' rows.
        declaring: Any = module
        declaring.written = [*getattr(module, "written", ()), *names]

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # D = sum_k p_k s_k pad(B_k)
        _, D = sent.averaged(sent.p)
        A = sent.old_A
        if (sent.round + 1) % self.period != 0:
            return Merged(applied=Product(D[:, : sent.top], A[: sent.top]), D=D)

        # D A = U S V^T
        U, S, V = Product(D, A).svd()
        new_A, new_D = largest_components(U, S, V, sent.start)
        new_A = rounded(new_A)
        new_D = rounded(new_D)

        # Ranks that no client had in this round are in the new factors, but not in M.
        kept = Product(D[:, sent.top :], A[sent.top :])
        return Merged(applied=Product(new_D, new_A) - kept, A=new_A, D=new_D)
