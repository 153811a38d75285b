"""Checks that what a call writes does not overlap its other arguments."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightfed_kernels._rows import addresses


def check_apart(
    written: tuple[str, Sequence[Tensor]], *others: tuple[str, Sequence[Tensor]]
) -> None:
    """Check that written rows share no memory with each other or with rows that are read.

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
        if not len(lows) or not len(begins) or lows.min() >= ends[-1] or highs.max() <= begins[0]:
            continue
        # Written rows do not overlap, so the last one that begins before an end reaches furthest.
        nearest = np.searchsorted(begins, highs, side="left") - 1
        if ((nearest >= 0) & (ends[nearest] > lows)).any():
            raise ValueError(f"{other}: shares memory with {name}, which is written")


def _spans(name: str, tensors: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The first byte of every non-empty row, and the first byte after it."""
    kept = [tensor for tensor in tensors if tensor.numel()]
    begins = addresses(name, kept)
    lengths = [tensor.shape[-1] * tensor.element_size() for tensor in kept]
    counts = [tensor.shape[0] if tensor.dim() == 2 else 1 for tensor in kept]
    if len(kept) == 1:
        return begins, begins + lengths[0]
    return begins, begins + np.repeat(np.array(lengths, np.int64), counts)
