"""Memory: glibc's heap, and estimates that are compared with the machine."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

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


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that this process may still take; infinite where the system does not say.

    Args:
        proc: of the system.
        groups: its control groups, of version 2; they limit the jobs of a cluster.
    """
    free = float("inf")
    with suppress(OSError, KeyError, ValueError):
        free = 1024.0 * _numbers(proc / "meminfo")["MemAvailable:"]
    with suppress(OSError, KeyError, ValueError):
        own = groups / (proc / "self/cgroup").read_text().splitlines()[-1].partition("::/")[2]
        for group in (own, *own.parents):
            with suppress(OSError, KeyError, ValueError):  # no limit
                limit = int((group / "memory.max").read_text())
                taken = int((group / "memory.current").read_text())
                free = min(free, limit - taken + _numbers(group / "memory.stat")["inactive_file"])
    return free


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by its name."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines}


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if libc is not None and hasattr(libc, "gnu_get_libc_version") else None
