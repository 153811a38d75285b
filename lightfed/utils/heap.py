"""glibc's heap: kept during training, trimmed after set-up."""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)


def keep_heap() -> None:
    """Ask glibc to keep freed memory.

    Returning it to the system after every batch costs a tenth of a CPU round.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest value glibc accepts
        libc.mallopt(_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_TOP_PAD, 64 << 20)


def trim_heap() -> None:
    """Return memory freed after set-up: half of what a registered client takes."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if libc is not None and hasattr(libc, "gnu_get_libc_version") else None
