"""The senders of every receiver, in the form that kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
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
        index = np.fromiter(chain.from_iterable(lists), np.int64)
        ends = np.cumsum([len(own) for own in lists], dtype=np.int64)
        wrong = np.flatnonzero((index < 0) | (index >= senders))
        if len(wrong):
            receiver = np.searchsorted(ends, wrong[0], side="right")
            raise ValueError(
                f"receiver {receiver}: neighbour {index[wrong[0]]} out of range 0 .. {senders - 1}"
            )
        shares = None if weights is None else _checked_weights(weights, lists)
        if shares is not None:
            used = shares != 0
            ends = np.append(0, np.cumsum(used))[ends]
            index, shares = index[used], shares[used]
        return cls(
            torch.from_numpy(np.append(0, ends)),
            torch.from_numpy(index),
            None if shares is None else torch.from_numpy(shares),
            senders,
        )


def _checked_weights(
    weights: Sequence[Sequence[float]], lists: Sequence[Sequence[int]]
) -> np.ndarray:
    if len(weights) != len(lists):
        raise ValueError(f"weights: of {len(weights)} receivers; there are {len(lists)}")
    for receiver, (given, neighbours) in enumerate(zip(weights, lists, strict=True)):
        if len(given) != len(neighbours):
            raise ValueError(
                f"receiver {receiver}: {len(given)} weights for {len(neighbours)} neighbours"
            )
        for weight, neighbour in zip(given, neighbours, strict=True):
            if not (weight == 0 or SMALLEST <= weight <= LARGEST):
                raise ValueError(
                    f"receiver {receiver}: weight {weight} of neighbour {neighbour}; a weight is 0 "
                    f"or between {SMALLEST} and {LARGEST}"
                )
    return np.fromiter(chain.from_iterable(weights), np.float64)
