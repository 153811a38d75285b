"""The senders of every receiver, in the form that kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

# Weights outside of these bounds could vanish or overflow in float32, in which they are summed.
SMALLEST = 1e-30
LARGEST = 1e30


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The senders of every receiver, in the order of summation. They are made by `build`.

    Attributes:
        first: (R + 1,) int64; receiver r has `index[first[r] : first[r + 1]]`.
        index: (E,) int64, the rows of the senders.
        weights: (E,) float64; None if all weigh the same.
        senders: The number of all rows.
    """

    first: Tensor
    index: Tensor
    weights: Tensor | None
    senders: int

    @property
    def receivers(self) -> int:
        """The number R of receivers."""
        return self.first.shape[0] - 1

    @classmethod
    def build(
        cls,
        lists: Sequence[Sequence[int]],
        *,
        senders: int,
        weights: Sequence[Sequence[float]] | None = None,
    ) -> "Neighbours":
        """Build from one list of senders per receiver.

        Args:
            lists: The senders of every receiver.
            senders: The number of all rows.
            weights: A weight for each of them; those of weight 0 are skipped.

        Raises:
            ValueError: A neighbor is no sender, or a weight cannot be used.
        """
        index = np.fromiter(chain.from_iterable(lists), np.int64)
        ends = np.cumsum(
            [len(senders_of_receiver) for senders_of_receiver in lists], dtype=np.int64
        )
        wrong = np.flatnonzero((index < 0) | (index >= senders))
        if len(wrong):
            receiver = np.searchsorted(ends, wrong[0], side="right")
            raise ValueError(
                f"receiver {receiver}: neighbour {index[wrong[0]]} out of range 0 .. {senders - 1}"
            )

        if weights is None:
            first = np.append(0, ends)
            return cls(torch.from_numpy(first), torch.from_numpy(index), None, senders)

        flat_weights = _checked_weights(weights, lists)
        is_used = flat_weights != 0
        used_before = np.append(0, np.cumsum(is_used))
        first = np.append(0, used_before[ends])
        return cls(
            torch.from_numpy(first),
            torch.from_numpy(index[is_used]),
            torch.from_numpy(flat_weights[is_used]),
            senders,
        )


def _checked_weights(
    weights: Sequence[Sequence[float]], lists: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return the weights of all receivers one after the other, after checking them."""
    if len(weights) != len(lists):
        raise ValueError(f"weights: of {len(weights)} receivers; there are {len(lists)}")
    for receiver, (own_weights, neighbours) in enumerate(zip(weights, lists, strict=True)):
        if len(own_weights) != len(neighbours):
            raise ValueError(
                f"receiver {receiver}: {len(own_weights)} weights for {len(neighbours)} neighbours"
            )
        for weight, neighbour in zip(own_weights, neighbours, strict=True):
            if not (weight == 0 or SMALLEST <= weight <= LARGEST):
                raise ValueError(
                    f"receiver {receiver}: weight {weight} of neighbour {neighbour}; a weight is 0 "
                    f"or between {SMALLEST} and {LARGEST}"
                )
    return np.fromiter(chain.from_iterable(weights), np.float64)
