"""Means by class: what clients exchange in place of weights, and what their gates are told by."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ClassMeans:
    """A vector for each of some classes: a package that travels.

    Attributes:
        values: (C, D) float32; zeros for a class that is not there.
        seen: (C,) bool, the classes that are there.
    """

    values: Tensor
    seen: Tensor

    @classmethod
    def none(cls, classes: int, size: int) -> "ClassMeans":
        """No class at all."""
        return cls(torch.zeros(classes, size), torch.zeros(classes, dtype=torch.bool))

    @property
    def bytes(self) -> int:
        """Encoded: of every class that is there a vector and an int64 label."""
        return int(self.seen.sum()) * (4 * self.values.shape[1] + 8)

    def to(self, device: torch.device) -> "ClassMeans":
        return ClassMeans(self.values.to(device), self.seen.to(device))

    def over(self, older: "ClassMeans") -> "ClassMeans":
        """These, and the older ones of the classes that are not among them."""
        values = torch.where(self.seen[:, None], self.values, older.values)
        return ClassMeans(values, self.seen | older.seen)


class ClassSums:
    """Sums of vectors by class, batch by batch.

    In float64, which neither autocast nor reduced-precision products touch.

    Args:
        classes: C.
        size: D.
        device: of the vectors.
    """

    def __init__(self, classes: int, size: int, *, device: torch.device) -> None:
        self._sums = torch.zeros(classes, size, dtype=torch.float64, device=device)
        self._counts = torch.zeros(classes, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, y: Tensor, values: Tensor) -> None:
        """Add a batch.

        Args:
            y: (B,) labels.
            values: (B, D).
        """
        # A product, because adding by index has no fixed order on a GPU.
        member = F.one_hot(y, len(self._counts)).double()
        self._sums += member.T @ values.double()
        self._counts += member.sum(0)

    def means(self) -> ClassMeans:
        """Over all samples so far."""
        means = self._sums / self._counts.clamp(min=1)[:, None]
        return ClassMeans(means.float(), self._counts > 0)


def mean_of_clients(packages: Sequence[ClassMeans]) -> ClassMeans:
    """What the server makes of its clients' packages: the mean over those that have a class.

    Unweighted, as in FD and FedProto. A class that nobody has is not there.

    Args:
        packages: at least one, all of one shape; summed in float64 in the order given.
    """
    sums = torch.zeros_like(packages[0].values, dtype=torch.float64)
    counts = torch.zeros_like(packages[0].seen, dtype=torch.int64)
    for package in packages:
        sums += torch.where(package.seen[:, None], package.values, 0).double()
        counts += package.seen
    return ClassMeans((sums / counts.clamp(min=1)[:, None]).float(), counts > 0)
