"""Sums of low-rank matrices, held as their factors and never formed: norms and singular values."""

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
        """sum_k w_k left_k right_k, whose factors are stacked in the given order."""
        scaled = [weight * left for weight, left in zip(weights, lefts, strict=True)]
        return cls(torch.cat(scaled, 1), torch.cat([*rights]))

    def __sub__(self, other: "Product") -> "Product":
        return Product.sum([1, -1], [self.left, other.left], [self.right, other.right])

    @cached_property
    def dense(self) -> Tensor:
        """(out, in)."""
        return self.left @ self.right

    def norm(self) -> float:
        """The Frobenius norm: ||R1 R2^T|| of left = Q1 R1 and right^T = Q2 R2."""
        _, r1 = torch.linalg.qr(self.left, mode="r")
        _, r2 = torch.linalg.qr(self.right.T, mode="r")
        return float((r1 @ r2.T).norm())

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U (out, m), S (m,) descending and V (in, m), by the SVD of R1 R2^T = X S Y^T.

        Of every column of V the entry of largest magnitude is positive, for the same bits.
        """
        q1, r1 = torch.linalg.qr(self.left)
        q2, r2 = torch.linalg.qr(self.right.T)
        x, s, yt = torch.linalg.svd(r1 @ r2.T, full_matrices=False)
        u, v = q1 @ x, q2 @ yt.T
        signs = v.gather(0, v.abs().argmax(0, keepdim=True)).sign()
        return u * signs, s, v * signs
