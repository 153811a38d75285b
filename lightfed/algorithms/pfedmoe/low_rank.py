"""FedKD's compression: low-rank factors instead of matrices.

Wu et al. 2022, https://arxiv.org/abs/2108.13323. Of every matrix the fewest singular
values are kept whose squares make up more than a share of all squares (the energy). A tensor of
more than two dimensions is a batch of the matrices in its last two (kernels of a convolution), with
one rank for all of them. Vectors and tensors with a first dimension of 1 are sent uncompressed.

The released code never tries the full rank, so it sends nothing of a matrix with nearly equal
singular values; here the rank may be full. That code also mistakes a vector of three numbers for
the factors of a matrix; a package knows its kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Package:
    """One tensor as sent: itself, or its factors U (..., m, n), s (..., n), V^T (..., n, k)."""

    parts: tuple[Tensor] | tuple[Tensor, Tensor, Tensor]

    @property
    def bytes(self) -> int:
        """Bytes of its numbers."""
        return sum(part.nbytes for part in self.parts)

    def tensor(self) -> Tensor:
        """The tensor that the receiver reconstructs."""
        if len(self.parts) == 1:
            return self.parts[0]
        left, values, right = self.parts
        return (left * values.unsqueeze(-2)) @ right


def energy_of_round(t: int, rounds: int, *, start: float = 0.95, end: float = 0.98) -> float:
    """The energy to keep in round t = 0, 1, ...; it grows linearly to `end` in the last one."""
    return start + (t + 1) / rounds * (end - start)


@torch.no_grad()
def compress(tensors: Mapping[str, Tensor], energy: float) -> dict[str, Package]:
    """Packages of tensors by their names.

    A tensor that would lose nothing, or that is smaller than its factors, is sent whole; in the
    second case with the values that the factors would give. `energy` is the share of the squared
    singular values to exceed, in [0, 1]; 1 keeps every tensor.
    """
    assert 0 <= energy <= 1, f"energy {energy}"
    return {name: _package(tensor, energy) for name, tensor in tensors.items()}


def kept_rank(values: Tensor, energy: float) -> int:
    """The smallest n with sum_{i < n} s_i^2 > energy sum_i s_i^2, or all if there is none.

    `values` are (..., r) singular values, descending; those of all matrices are summed.
    """
    squares = values.double().square().reshape(-1, values.shape[-1]).sum(0)
    sums = squares.cpu().cumsum(0)  # a card may add up in any order
    short = int((sums <= energy * sums[-1]).sum())
    return min(short + 1, len(sums))


def _package(tensor: Tensor, energy: float) -> Package:
    whole = Package((tensor.clone(),))
    if tensor.dim() < 2 or tensor.shape[0] == 1:
        return whole
    left, values, right = torch.linalg.svd(tensor, full_matrices=False)
    rank = kept_rank(values, energy)
    if rank == values.shape[-1]:
        return whole
    factors = Package(
        (
            left[..., :rank].contiguous(),
            values[..., :rank].contiguous(),
            right[..., :rank, :].contiguous(),
        )
    )
    return factors if factors.bytes < whole.bytes else Package((factors.tensor(),))
