"""LoRA-FAIR: the mean of the factors, and a correction of B towards the mean of the products.

Bian, Wang, Zhang, Xu: LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization
Refinement. ICCV 2025. https://arxiv.org/abs/2411.14961

    A, B <- means of the clients' factors;   M = mean of the products B_k A_k
    X = argmin  1 - cos(M, (B + X) A) + lambda ||X||^2        similarity: cosine, by gradient steps
    X = argmin  ||M - (B + X) A||^2 + lambda ||X||^2          similarity: l2, in closed form
    B <- B + X

The closed form is  X = (M A^T - B A A^T) (A A^T + lambda I)^-1.  Its error is never above that of
the means alone.

Deviations: `l2` is the default; implementations of the paper have the angle. It does not see the
length of the update, and where B is small, as after few steps, the iteration multiplies it. Clients
can have unlike ranks and scales. The means are by rank, and the problem is that of B = D / s, with
the mean scale s = sum_k p_k s_k.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent, rounded
from lightfed.algorithms.lora.products import Product
from lightfed.api.algorithm import KEY
from lightfed.utils.bounds import Count, Positive, Weight
from lightfed.utils.errors import UserError


class LoRAFAIR(AdapterRule):
    """A by rank, and a B whose product with it is close to the mean of the clients' products."""

    takes_late = True

    def __init__(
        self,
        similarity: Literal["l2", "cosine"] = "l2",
        regularization: Weight = 0.01,
        steps: Count = 1000,
        step_size: Positive = 0.01,
        **rule: Any,
    ) -> None:
        """Set how B is corrected.

        Args:
            similarity: Whether the product is close to M by the norm of the difference (`l2`) or
                by the angle (`cosine`).
            regularization: lambda, the weight of the correction's size; above 0 for `l2`.
            steps: Number of gradient steps for `cosine`.
            step_size: Size of these steps.
            **rule: `weights` and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        if similarity == "l2" and regularization == 0:
            raise UserError(
                f"{KEY}.regularization", "0, with similarity l2", "give a number above 0"
            )
        self.similarity = similarity
        self.regularization = regularization
        self.steps = steps
        self.step_size = step_size

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        A, D = sent.averaged(sent.p, by_rank=True)

        # In the units of B, on the ranks that clients of this round have.
        s = sent.mean_scale
        A_top = A[: sent.top]
        B = D[:, : sent.top] / s
        M = Product(sent.mean.left / s, sent.mean.right)

        D = D.clone()
        D[:, : sent.top] = rounded(s * (B + self.correction(M, A_top, B)))
        return Merged(applied=Product(D[:, : sent.top], A_top), A=A, D=D)

    def correction(self, M: Product, A: Tensor, B: Tensor) -> Tensor:
        """Return X, (out, r).

        Args:
            M: The mean of the products, (out, in).
            A: The mean of the clients' A, (r, in).
            B: The mean of the clients' B, (out, r).
        """
        P = M.left @ (M.right @ A.T)  # M A^T
        G = A @ A.T
        if self.similarity == "cosine":
            return self._by_steps(P, G, B, M.norm())

        # X = (P - B G) (G + lambda I)^-1, and G is symmetric
        identity = torch.eye(len(G), dtype=G.dtype, device=G.device)
        return torch.linalg.solve(G + self.regularization * identity, (P - B @ G).T).T

    def _by_steps(self, P: Tensor, G: Tensor, B: Tensor, norm_M: float) -> Tensor:
        """Return the X that gradient steps from 0 find for 1 - cos(M, (B + X) A) + lambda ||X||^2.

        With Y = B + X and n = ||Y A|| the gradient is

            - (P / (||M|| n) - <P, Y> Y G / (||M|| n^3)) + 2 lambda X
        """
        X = torch.zeros_like(B)
        has_no_angle = norm_M == 0 or float(((B @ G) * B).sum()) <= 0
        if has_no_angle:
            return X

        for _ in range(self.steps):
            Y = B + X
            YG = Y @ G
            n = (YG * Y).sum().sqrt()
            cosine_slope = P / (norm_M * n) - (P * Y).sum() * YG / (norm_M * n**3)
            X = X - self.step_size * (2 * self.regularization * X - cosine_slope)
        return X
