"""Means by class, which clients exchange instead of weights and which describe their gates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassMeans:
    """A vector (D) for each of C classes, as sent: float32, zeros for one that was not seen."""

    values: Tensor
    seen: Tensor

    @property
    def bytes(self) -> int:
        """Encoded size: a vector and an int64 label per class present."""
        return int(self.seen.sum()) * (4 * self.values.shape[1] + 8)

    def to(self, device: torch.device) -> "ClassMeans":
        return ClassMeans(self.values.to(device), self.seen.to(device))

    def over(self, older: "ClassMeans") -> "ClassMeans":
        """These vectors, with the older ones of missing classes."""
        values = torch.where(self.seen[:, None], self.values, older.values)
        return ClassMeans(values, self.seen | older.seen)


class ClassSums:
    """Sums of vectors by class, batch by batch.

    The sums are float64, which neither autocast nor reduced-precision products affect. `sums` are
    (C, D) float64 so far, changed in place; `counts` (C,) are numbers of vectors.
    """

    def __init__(self, sums: Tensor, counts: Tensor) -> None:
        self._sums, self._counts = sums, counts

    @torch.no_grad()
    def add(self, y: Tensor, values: Tensor) -> None:
        """Add a batch of values (B, D) with labels (B,)."""
        # A matrix product, because adding by index has no fixed order on a GPU.
        member = (y[:, None] == torch.arange(len(self._counts), device=y.device)).double()
        self._sums.add_(member.T @ values.double())
        self._counts.add_(member.sum(0))

    def means(self) -> ClassMeans:
        """Over all samples so far."""
        means = self._sums / self._counts.clamp(min=1)[:, None]
        return ClassMeans(means.float(), self._counts > 0)


def mean_of_clients(packages: Sequence[ClassMeans]) -> ClassMeans:
    """Aggregate the clients' packages: the mean over those that have a class.

    Unweighted, as in FD and FedProto. Classes without clients are missing. The packages, at least
    one, have one shape, and are summed in float64 in the order given.
    """
    sums = torch.zeros_like(packages[0].values, dtype=torch.float64)
    counts = torch.zeros_like(packages[0].seen, dtype=torch.int64)
    for package in packages:
        sums += torch.where(package.seen[:, None], package.values, 0).double()
        counts += package.seen
    return ClassMeans((sums / counts.clamp(min=1)[:, None]).float(), counts > 0)


def distances(x: Tensor, vectors: Tensor) -> Tensor:
    """(B, D) and (C, D) -> (B, C) Euclidean distances.

    Not by a matrix product, which loses precision for small ones.
    """
    return torch.cdist(x, vectors, compute_mode="donot_use_mm_for_euclid_dist")
