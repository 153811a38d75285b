"""A lock for each run of a list, so that two commands on one folder do not train it twice.

The process that trains holds the lock, not the command that has started it: the lock ends with the
training, however either of them dies. A command that is killed may leave its runs behind. The next
command waits for them.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from lightfed.cli.wanted import Wanted

FOLDER = ".locks"  # beside the runs


def path_of(wanted: Wanted) -> Path:
    """Return the file that is locked while a run trains.

    A run of the same name with other settings has another file.
    """
    return wanted.root / FOLDER / wanted.diverged.with_suffix(".lock").name


def take(wanted: Wanted) -> int | None:
    """Lock a run, unless another process has locked it.

    On a file system without locks, every process gets one.

    Returns:
        The descriptor of the lock, to hold or to hand to a child. None if another process has it.
    """
    path = path_of(wanted)
    path.parent.mkdir(parents=True, exist_ok=True)

    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            # The file system has no locks.
            return descriptor

        if _is_at(descriptor, path):
            return descriptor

        # The last holder has removed the file since we opened it: its lock protects nothing.
        os.close(descriptor)


def wait(wanted: Wanted) -> int:
    """Lock a run as soon as no other process has locked it, and return the descriptor."""
    path = path_of(wanted)
    path.parent.mkdir(parents=True, exist_ok=True)

    while True:
        descriptor = _open(path)
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)

        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)


def clear(wanted: Wanted) -> None:
    """Remove the lock of a run if no process has it, and the folder if it was the last one."""
    path = path_of(wanted)
    if not path.exists():
        return

    descriptor = take(wanted)
    if descriptor is None:
        return

    # Remove it while it is locked: a process that waits for it then notices and opens a new one.
    path.unlink(missing_ok=True)
    os.close(descriptor)

    with suppress(OSError):  # the folder holds other locks
        path.parent.rmdir()


def _open(path: Path) -> int:
    # Others may run the same list, if the folder of the runs lets them.
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
