"""The senders of every receiver, in the form that kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

# Weights outside of these bounds could vanish or overflow in float32, where a sum of them is held.
SMALLEST, LARGEST = 1e-30, 1e30


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The senders of every receiver, in the order of summation. Made by `build`, which checks.

    Attributes:
        first: (R + 1,) int64; receiver r owns `index[first[r] : first[r + 1]]`.
        index: (E,) int64, rows of the senders.
        weights: (E,) float64, or None if all are equal.
        senders: total number of rows.
    """

    first: Tensor
    index: Tensor
    weights: Tensor | None
    senders: int

    @property
    def receivers(self) -> int:
        return self.first.shape[0] - 1

    @classmethod
    def build(
        cls,
        lists: Sequence[Sequence[int]],
        *,
        senders: int,
        weights: Sequence[Sequence[float]] | None = None,
    ) -> "Neighbours":
        """Build from one list per receiver; neighbours of weight 0 are skipped.

        Raises:
            ValueError: a neighbour is not a sender, or a weight cannot be used.
        """
        if weights is not None and len(weights) != len(lists):
            raise ValueError(f"weights: of {len(weights)} receivers; there are {len(lists)}")
        index: list[int] = []
        kept: list[float] = []
        first = [0]
        for receiver, neighbours in enumerate(lists):
            given = None if weights is None else weights[receiver]
            if given is not None and len(given) != len(neighbours):
                raise ValueError(
                    f"receiver {receiver}: {len(given)} weights for {len(neighbours)} neighbours"
                )
            for position, neighbour in enumerate(neighbours):
                _check_neighbour(receiver, neighbour, senders)
                if given is not None:
                    _check_weight(receiver, neighbour, given[position])
                    if given[position] == 0:
                        continue
                    kept.append(float(given[position]))
                index.append(int(neighbour))
            first.append(len(index))
        return cls(
            torch.tensor(first, dtype=torch.int64),
            torch.tensor(index, dtype=torch.int64),
            None if weights is None else torch.tensor(kept, dtype=torch.float64),
            senders,
        )


def _check_neighbour(receiver: int, neighbour: int, senders: int) -> None:
    if not 0 <= neighbour < senders:
        raise ValueError(
            f"receiver {receiver}: neighbour {neighbour} out of range 0 .. {senders - 1}"
        )


def _check_weight(receiver: int, neighbour: int, weight: float) -> None:
    if isfinite(weight) and (weight == 0 or SMALLEST <= weight <= LARGEST):
        return
    raise ValueError(
        f"receiver {receiver}: weight {weight} of neighbour {neighbour}; a weight is 0 or between "
        f"{SMALLEST} and {LARGEST}"
    )
