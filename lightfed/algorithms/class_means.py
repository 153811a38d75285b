"""Mean vectors by class, which clients exchange instead of weights and which describe their gates.

FD, FedProto and their relatives use them, and pFedMoE's gates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassMeans:
    """A vector for each of C classes, as it is sent.

    Attributes:
        values: (C, D) float32; zeros for a class that was not seen.
        seen: (C,) bool, whether there is a vector of the class.
    """

    values: Tensor
    seen: Tensor

    @property
    def bytes(self) -> int:
        """The encoded size: a float32 vector and an int64 label for each class that was seen."""
        return int(self.seen.sum()) * (4 * self.values.shape[1] + 8)

    def to(self, device: torch.device) -> "ClassMeans":
        """Return these vectors on a device."""
        return ClassMeans(self.values.to(device), self.seen.to(device))

    def over(self, older: "ClassMeans") -> "ClassMeans":
        """Return these vectors, and the older ones of classes that are missing here."""
        values = torch.where(self.seen[:, None], self.values, older.values)
        return ClassMeans(values, self.seen | older.seen)


class ClassSums:
    """Sums of vectors by class, batch by batch.

    The sums are float64, which neither autocast nor reduced-precision products affect.

    Args:
        sums: (C, D) float64, the sums so far; changed in place.
        counts: (C,), the numbers of vectors so far; changed in place.
    """

    def __init__(self, sums: Tensor, counts: Tensor) -> None:
        self._sums = sums
        self._counts = counts

    @torch.no_grad()
    def add(self, y: Tensor, values: Tensor) -> None:
        """Add a batch of vectors (B, D) with labels (B,)."""
        # A matrix product, because adding by index has no fixed order on a GPU.
        classes = torch.arange(len(self._counts), device=y.device)
        is_of_class = (y[:, None] == classes).double()  # (B, C)
        self._sums.add_(is_of_class.T @ values.double())
        self._counts.add_(is_of_class.sum(0))

    def means(self) -> ClassMeans:
        """Return the means over all samples so far."""
        means = self._sums / self._counts.clamp(min=1)[:, None]
        return ClassMeans(means.float(), self._counts > 0)


def mean_of_clients(packages: Sequence[ClassMeans]) -> ClassMeans:
    """Return the mean of every class over the clients that have seen it.

    It is unweighted, as in FD and FedProto. Classes that no client has seen are missing.

    Args:
        packages: One of each client, at least one, all of one shape. They are summed in float64 in
            this order.
    """
    sums = torch.zeros_like(packages[0].values, dtype=torch.float64)
    counts = torch.zeros_like(packages[0].seen, dtype=torch.int64)
    for package in packages:
        sums += torch.where(package.seen[:, None], package.values, 0).double()
        counts += package.seen
    return ClassMeans((sums / counts.clamp(min=1)[:, None]).float(), counts > 0)


def distances(x: Tensor, vectors: Tensor) -> Tensor:
    """Return the Euclidean distances (B, C) between vectors (B, D) and (C, D).

    They are not computed by a matrix product, which loses precision for small distances.
    """
    return torch.cdist(x, vectors, compute_mode="donot_use_mm_for_euclid_dist")
