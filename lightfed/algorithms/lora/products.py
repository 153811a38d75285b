"""Sums of low-rank matrices, held as factors: norms and singular values without the matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Product:
    """The matrix left @ right, (out, in).

    Attributes:
        left: (out, n) float64.
        right: (n, in) float64.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def sum(
        cls, weights: Sequence[float], lefts: Sequence[Tensor], rights: Sequence[Tensor]
    ) -> "Product":
        """Return sum_k w_k left_k right_k; its factors are stacked in the given order."""
        scaled = [weight * left for weight, left in zip(weights, lefts, strict=True)]
        return cls(torch.cat(scaled, 1), torch.cat([*rights]))

    def __sub__(self, other: "Product") -> "Product":
        return Product.sum([1, -1], [self.left, other.left], [self.right, other.right])

    @cached_property
    def dense(self) -> Tensor:
        """The matrix itself, (out, in)."""
        return self.left @ self.right

    def norm(self) -> float:
        """Return the Frobenius norm, ||R1 R2^T|| with left = Q1 R1 and right^T = Q2 R2.

        Of more factors than the matrix has rows or columns it is that of the matrix itself, which
        then takes less to make than R1 and R2.
        """
        outputs, factors = self.left.shape
        if factors >= min(outputs, self.right.shape[1]):
            return float(self.dense.norm())

        _, r1 = torch.linalg.qr(self.left, mode="r")
        _, r2 = torch.linalg.qr(self.right.T, mode="r")
        return float((r1 @ r2.T).norm())

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return U (out, m), S (m,) descending and V (in, m), by the SVD of R1 R2^T = X S Y^T.

        In every column of V the entry of largest magnitude is positive. Without such a rule the
        sign of a column would be arbitrary, and with it the bits of a merge.
        """
        Q1, R1 = torch.linalg.qr(self.left)
        Q2, R2 = torch.linalg.qr(self.right.T)
        X, S, Y_T = torch.linalg.svd(R1 @ R2.T, full_matrices=False)
        U = Q1 @ X
        V = Q2 @ Y_T.T
        signs = V.gather(0, V.abs().argmax(0, keepdim=True)).sign()
        return U * signs, S, V * signs


def components_of_energy(S: Tensor, energy: float) -> int:
    """Return the least q with sum_{i < q} S_i^2 >= energy * sum_i S_i^2; 0 if all are 0.

    Args:
        S: (m,) singular values, descending.
        energy: A share above 0 and at most 1.
    """
    # On the host, because a GPU adds cumulative sums in an order of its own.
    sums = S.cpu().square().cumsum(0)
    if not len(sums) or sums[-1] == 0:
        return 0
    return int((sums < energy * sums[-1]).sum()) + 1


def largest_components(
    U: Tensor, S: Tensor, V: Tensor, start: Tensor, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return factors A (R, in) and D (out, R) of the largest components: V^T and U S.

    Components that are zero up to rounding, and those beyond `most`, get D = 0 and the row of
    `start`. So the product is the same, the rank can be trained, and no rounding error decides
    about it.

    Args:
        U: (out, m) left singular vectors.
        S: (m,) singular values, descending.
        V: (in, m) right singular vectors.
        start: The common initial A, (R, in).
        most: The number of components that are kept at most; None for all.
    """
    # Below this, a singular value is a rounding error of the float32 factors.
    threshold = S[0] * max(len(U), len(V)) * torch.finfo(torch.float32).eps
    count = min(len(start), int((threshold < S).sum()))
    if most is not None:
        count = min(count, most)

    A = start.clone()
    D = U.new_zeros(len(U), len(start))
    A[:count] = V[:, :count].T
    D[:, :count] = U[:, :count] * S[:count]
    return A, D
