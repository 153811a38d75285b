"""FedKD's compression: low-rank factors instead of matrices.

Wu et al. 2022, https://arxiv.org/abs/2108.13323. Of every matrix the largest singular values are
kept: as few as possible, but so many that their squares make up more than a given share of all
squares, the energy. A tensor of more than two dimensions, such as the kernels of a convolution, is
a batch of the matrices in its last two, with one rank for all of them. Vectors, and tensors whose
first dimension is 1, are sent uncompressed.

Deviations: the released code never tries the full rank, so it sends nothing of a matrix with nearly
equal singular values. Here the rank can be full. That code also mistakes a vector of three numbers
for the factors of a matrix; here a package knows its kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Package:
    """One tensor as it is sent.

    Attributes:
        parts: The tensor itself; or its factors U (..., m, n), s (..., n) and V^T (..., n, k).
    """

    parts: tuple[Tensor] | tuple[Tensor, Tensor, Tensor]

    @property
    def bytes(self) -> int:
        """Number of bytes of what is sent."""
        return sum(part.nbytes for part in self.parts)

    def tensor(self) -> Tensor:
        """Return the tensor that the receiver reconstructs."""
        if len(self.parts) == 1:
            return self.parts[0]

        left, values, right = self.parts
        return (left * values.unsqueeze(-2)) @ right


def energy_of_round(t: int, rounds: int, *, start: float = 0.95, end: float = 0.98) -> float:
    """Return the energy to keep in round t = 0, 1, ...; it grows linearly to `end` in the last."""
    return start + (t + 1) / rounds * (end - start)


@torch.no_grad()
def compress(tensors: Mapping[str, Tensor], energy: float) -> dict[str, Package]:
    """Return packages of tensors by their names.

    A tensor is sent whole if it would lose nothing. It is also sent whole if it is smaller than its
    factors, but with the values that the factors would give.

    Args:
        tensors: What is sent, by name.
        energy: Share of the squared singular values to exceed, in [0, 1]; 1 keeps every tensor.
    """
    assert 0 <= energy <= 1, f"energy {energy}"
    return {name: _package(tensor, energy) for name, tensor in tensors.items()}


def kept_rank(values: Tensor, energy: float) -> int:
    """Return the smallest n with sum_{i < n} s_i^2 > energy sum_i s_i^2, or all if there is none.

    Args:
        values: Singular values, (..., r) descending; those of all matrices are summed.
        energy: Share of the sum of squares to exceed.
    """
    squares = values.double().square().reshape(-1, values.shape[-1]).sum(0)
    sums = squares.cpu().cumsum(0)  # a GPU may add up in any order
    too_few = int((sums <= energy * sums[-1]).sum())
    return min(too_few + 1, len(sums))


def _package(tensor: Tensor, energy: float) -> Package:
    """Return the package of one tensor; arguments as for `compress`."""
    whole = Package((tensor.clone(),))
    if tensor.dim() < 2 or tensor.shape[0] == 1:
        return whole

    left, values, right = torch.linalg.svd(tensor, full_matrices=False)
    rank = kept_rank(values, energy)
    if rank == values.shape[-1]:
        return whole

    kept_left = left[..., :rank].contiguous()
    kept_values = values[..., :rank].contiguous()
    kept_right = right[..., :rank, :].contiguous()
    factors = Package((kept_left, kept_values, kept_right))
    if factors.bytes < whole.bytes:
        return factors
    return Package((factors.tensor(),))
