"""Copies of rows for a thread that writes them while training changes the rows."""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors in host memory that is used again and again.

    The kernel's work for fresh memory takes several times as long as a copy.
    """

    def __init__(self) -> None:
        self._memory: dict[object, mmap.mmap] = {}

    def empty(self, key: object, like: Tensor, rows: int) -> Tensor:
        """(rows, ...) for a copy; it is valid until the next call with this key.

        Args:
            key: of the memory.
            like: a tensor of the same type, (n, ...).
            rows: its first dimension.
        """
        shape = (rows, *like.shape[1:])
        size = math.prod(shape) * like.element_size()
        if size == 0:
            return like.new_empty(shape)
        if key not in self._memory or len(self._memory[key]) < size:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):  # not on every system
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory[key] = memory
        held = self._memory[key]
        return torch.frombuffer(held, dtype=like.dtype, count=math.prod(shape)).view(shape)
