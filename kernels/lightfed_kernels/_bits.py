"""Bits of rows and packed masks in numpy, which is faster than torch on the CPU."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bytes(words: Tensor) -> np.ndarray:
    """Return the words of one mask as bytes of 8 elements each, without a copy."""
    return view(words, torch.uint8)


def as_integers(row: Tensor) -> np.ndarray:
    """Return the bits of one row as signed integers of the same width, without a copy."""
    return view(row, _INTEGERS[row.element_size()])


@cache
def select_table(dtype: str | type[np.floating]) -> np.ndarray:
    """Return a table (256, 8) of what a byte of a mask is as 8 integers: all ones where a bit is 1.

    `integers & table[byte]` selects, whatever the values are, and is ten times faster than a
    `where`. The integers are as wide as `dtype`.
    """
    width = np.dtype(dtype).itemsize
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return (-bits).astype(f"i{width}")


def view(tensor: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Return the memory of a tensor on the CPU as an array of another dtype."""
    return tensor.detach().view(dtype).numpy()


def ones_in(packed: np.ndarray, begin: int, size: int) -> np.ndarray:
    """Return the positions of the ones in `size` elements from `begin`, counted from there."""
    bits = np.unpackbits(packed[begin // 8 : (begin + size) // 8], bitorder="little")
    return np.flatnonzero(bits.view(np.bool_))


def count_ones(words: Tensor) -> np.ndarray:
    """Return how many bits of every row of (.., W) int32 on the CPU are 1, as (..) of int64."""
    return np.bitwise_count(view(words, torch.int32).view(np.uint32)).sum(-1, dtype=np.int64)
