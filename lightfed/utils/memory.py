"""Memory: glibc's heap, and estimates that are compared with the machine."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

# The numbers of mallopt(3).
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3

_MEBI = 1 << 20


def keep_heap() -> None:
    """Ask glibc to keep freed memory.

    Returning it to the system after every batch costs a tenth of a CPU round.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, 32 * _MEBI)  # the largest value that glibc accepts
        libc.mallopt(_TRIM_THRESHOLD, 1024 * _MEBI)
        libc.mallopt(_TOP_PAD, 64 * _MEBI)


def trim_heap() -> None:
    """Return memory that was freed after set-up: half of what a registered client takes."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes that this process may still take; infinite if the system does not say.

    Args:
        proc: The folder in which the system describes itself and its processes.
        groups: The folder of its control groups, of version 2. They limit the jobs of a cluster.
    """
    free = float("inf")
    with suppress(OSError, KeyError, ValueError):
        free = 1024.0 * _numbers(proc / "meminfo")["MemAvailable:"]

    # Not all systems have control groups.
    with suppress(OSError, KeyError, ValueError):
        for group in _own_groups(proc, groups):
            free = min(free, _free_in_group(group))
    return free


def _own_groups(proc: Path, groups: Path) -> list[Path]:
    """Return the folder of this process's control group, and all above it: each may limit it."""
    last_line = (proc / "self/cgroup").read_text().splitlines()[-1]
    own = groups / last_line.partition("::/")[2]
    return [own, *own.parents]


def _free_in_group(group: Path) -> float:
    """Return the bytes that a control group may still take; infinite without a limit."""
    with suppress(OSError, KeyError, ValueError):
        limit = int((group / "memory.max").read_text())
        taken = int((group / "memory.current").read_text())
        # The system gives up cached files that have not been used of late.
        reclaimable = _numbers(group / "memory.stat")["inactive_file"]
        return limit - taken + reclaimable
    return float("inf")


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file, by the word before it."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines}


def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process, if it is glibc."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
