"""What a call writes is touched by no other argument of it: half-updated values would be read."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightfed_kernels._rows import addresses


def check_apart(
    written: tuple[str, Sequence[Tensor]], *others: tuple[str, Sequence[Tensor]]
) -> None:
    """Rows that are written share no memory with each other, nor with rows that are read.

    Raises:
        ValueError: two rows overlap, or a row does not start at a multiple of 16 bytes.
    """
    name, tensors = written
    begins, ends = _spans(name, tensors)
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    clash = begins[1:] < ends[:-1]
    if clash.any():
        first = int(np.flatnonzero(clash)[0])
        rows = sorted((int(order[first]), int(order[first + 1])))
        raise ValueError(f"{name}: rows {rows[0]} and {rows[1]} share memory; one is written twice")
    for other, given in others:
        lows, highs = _spans(other, given)
        # What is written lies apart, so the last that begins before an end is the one to reach it.
        nearest = np.searchsorted(begins, highs, side="left") - 1
        if ((nearest >= 0) & (ends[nearest] > lows)).any() if len(begins) else False:
            raise ValueError(f"{other}: shares memory with {name}, which is written")


def _spans(name: str, tensors: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The first byte of every row and the one behind its last; empty rows have none."""
    kept = [tensor for tensor in tensors if tensor.numel()]
    begins = addresses(name, kept)
    lengths = [
        np.full(
            tensor.shape[0] if tensor.dim() == 2 else 1, tensor.shape[-1] * tensor.element_size()
        )
        for tensor in kept
    ]
    return begins, begins + (np.concatenate(lengths) if lengths else np.empty(0, np.int64))
