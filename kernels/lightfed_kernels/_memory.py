"""Checks that what a call writes does not overlap its other arguments."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightfed_kernels._rows import addresses


def check_apart(
    written: tuple[str, Sequence[Tensor]], *others: tuple[str, Sequence[Tensor]]
) -> None:
    """Check that written rows share no memory with each other or with rows that are read.

    Args:
        written: The name of the argument that is written, and its matrices and rows.
        *others: The same of arguments that are read.

    Raises:
        ValueError: Two rows overlap, or a row does not start at a multiple of 16 bytes.
    """
    name, tensors = written
    if len(tensors) == 1 and _lies_apart(tensors[0], [one for _, some in others for one in some]):
        return
    begins, ends = _spans(name, tensors)
    order = np.argsort(begins, kind="stable")
    begins = begins[order]
    ends = ends[order]

    overlaps_next = begins[1:] < ends[:-1]
    if overlaps_next.any():
        position = int(np.flatnonzero(overlaps_next)[0])
        row, other_row = sorted((int(order[position]), int(order[position + 1])))
        raise ValueError(f"{name}: rows {row} and {other_row} share memory; one is written twice")

    for other_name, other_tensors in others:
        other_begins, other_ends = _spans(other_name, other_tensors)
        if not len(other_begins) or not len(begins):
            continue
        if other_begins.min() >= ends[-1] or other_ends.max() <= begins[0]:
            continue  # most rows lie far from each other: no need to compare them one by one
        # Written rows do not overlap. So of those that begin before the end of a row that is read,
        # the last one reaches furthest.
        last_before = np.searchsorted(begins, other_ends, side="left") - 1
        if ((last_before >= 0) & (ends[last_before] > other_begins)).any():
            raise ValueError(f"{other_name}: shares memory with {name}, which is written")


def _lies_apart(written: Tensor, others: Sequence[Tensor]) -> bool:
    """Return whether a matrix or row lies wholly before or behind all others, and is in order.

    Its rows are apart and begin at multiples of 16 bytes. This is so in most calls, and is seen
    without looking at each row.
    """
    step = written.stride(0) * written.element_size() if written.dim() == 2 else 0
    if written.dim() == 2 and written.stride(0) < written.shape[1]:
        return False
    begin, end = _extent(written)
    if begin % 16 or step % 16:
        return False

    for other in others:
        other_begin, other_end = _extent(other)
        if other_begin < end and begin < other_end:
            return False
    return True


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a matrix or row, and the byte behind its last."""
    begin = tensor.data_ptr()
    elements = tensor.shape[-1]
    if tensor.dim() == 2:
        elements += tensor.stride(0) * (tensor.shape[0] - 1)
    return begin, begin + elements * tensor.element_size()


def _spans(name: str, tensors: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first byte of every row that is not empty, and the byte behind its last."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    begins = addresses(name, tensors)
    lengths = [tensor.shape[-1] * tensor.element_size() for tensor in tensors]
    if len(tensors) == 1:
        return begins, begins + lengths[0]
    rows = [tensor.shape[0] if tensor.dim() == 2 else 1 for tensor in tensors]
    return begins, begins + np.repeat(np.array(lengths, np.int64), rows)
