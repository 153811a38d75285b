"""FedRot-LoRA: clients turn their factors towards those that they received, before the mean.

Zhang, Kim, Cha, Vikalo: FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA. 2026.
https://arxiv.org/abs/2602.23638

    A_k <- Q^T A_k,  B_k <- B_k Q,  with a rotation Q: the product B_k A_k stays
    odd t:   Q* = argmin ||Q^T A_k - A||        even t > 0:   Q* = argmin ||B_k Q - B||
    Q = the rotation nearest to (1 - lambda) I + lambda Q*
    A, D <- means of the clients' factors

These are the equations as a library that cites the paper has them (FedLLM-Factory). A and B are
what a client received in this round. In round 0 they are the common start, and nothing is turned.

Deviations: clients can have unlike ranks; each turns its own, and the means are by rank. Where the
nearest rotation is not unique, as for a B that is still 0, a client leaves the factors of a layer
as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent, finished
from lightfed.algorithms.lora.products import Product
from lightfed.api.fleet import Fleet
from lightfed.utils.bounds import Part

# A nearest rotation is taken for not unique if the gap that decides it is below this share of the
# largest singular value.
_SMALLEST_GAP = 1e-6


class FedRotLoRA(AdapterRule):
    """The mean by rank of factors that have been turned."""

    no_late = "clients turn their factors towards what they were sent"
    no_memory = "clients turn their factors after every session"
    no_kept_optimizer = "clients turn their factors after every session"

    def __init__(self, strength: Part = 0.5, **rule: Any) -> None:
        """Set how far clients turn their factors.

        Args:
            strength: lambda, from 0 (not at all, as `RankMean`) to 1 (all the way to Q*).
            **rule: `weights` and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        self.strength = strength

    @override
    def before_sending(self, fed: Fleet, clients: Sequence[int], t: int) -> None:
        if t == 0:
            return

        # The server's model has not changed since it was sent.
        received = self.server_factors()
        for client in fed.mine(finished(fed, clients)):
            factors = self.factors(fed, client, fed.row(client).floats)
            for (A, B), (sent_A, sent_D) in zip(factors, received, strict=True):
                rank = len(A)
                if t % 2 == 1:
                    N = _on_host(A) @ _on_host(sent_A[:rank]).T
                else:
                    # A client received B = D / s_k. The scale does not change the rotation.
                    N = _on_host(B).T @ _on_host(sent_D[:, :rank])

                Q = self.rotation(N)
                if Q is not None:
                    turned_A = Q.T @ _on_host(A)
                    turned_B = _on_host(B) @ Q
                    A.copy_(turned_A)
                    B.copy_(turned_B)

    def rotation(self, N: Tensor) -> Tensor | None:
        """Return Q (r, r) for the product N (r, r) of a client's factor and the received one.

        None if it is not unique.
        """
        whole = nearest_rotation(N)
        if whole is None:
            return None

        # Half of half a turn is 0 but for rounding, which must not choose a rotation.
        identity = torch.eye(len(N), dtype=N.dtype)
        part = (1 - self.strength) * identity + self.strength * whole
        return nearest_rotation(part, size=1.0)

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        # A[j] = sum_{k: r_k > j} p_k A_k[j] / sum_{k: r_k > j} p_k, and likewise the columns of D
        A, D = sent.averaged(sent.p, by_rank=True)
        return Merged(applied=Product(D[:, : sent.top], A[: sent.top]), A=A, D=D)


def nearest_rotation(N: Tensor, *, size: float = 0.0) -> Tensor | None:
    """Return the rotation Q that maximizes <N, Q>; None if there are several.

    N = U S V^T;   Q = U diag(1, ..., 1, det(U V^T)) V^T

    Args:
        N: A matrix (r, r), float64.
        size: The size of what N was computed from, if that may be larger than N: rounding errors
            are relative to it.
    """
    U, S, V_T = torch.linalg.svd(N)
    sign = torch.linalg.det(U @ V_T).sign()
    if S[0] == 0:
        return None
    if len(S) > 1 and S[-2] + sign * S[-1] <= _SMALLEST_GAP * max(float(S[0]), size):
        return None

    flips = torch.ones_like(S)
    flips[-1] = sign
    return (U * flips) @ V_T


def _on_host(factor: Tensor) -> Tensor:
    """Return a factor in host memory, as float64."""
    return factor.detach().cpu().double()
