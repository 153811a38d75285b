"""A lock for each run of a list, so that two commands on one folder do not train it twice.

The process that trains holds the lock, and not the command that has started it: the lock ends with
the training, however either of them dies. A command that is killed may leave its runs behind; the
next one waits for them.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from lightfed.cli.wanted import Wanted

FOLDER = ".locks"  # beside the runs


def path_of(wanted: Wanted) -> Path:
    """The file that is locked while a run trains; another run of the name has another one."""
    return wanted.root / FOLDER / wanted.diverged.with_suffix(".lock").name


def take(wanted: Wanted) -> int | None:
    """Lock a run; a descriptor to hold or to hand to a child, or None if another process has it.

    Where the file system knows no locks, every process gets one.
    """
    path = path_of(wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            return descriptor
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # the last holder has just removed the file


def wait(wanted: Wanted) -> int:
    """Lock a run as soon as no other process has it."""
    path = path_of(wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)


def clear(wanted: Wanted) -> None:
    """Remove a lock that nobody has, and the folder with the last one."""
    path = path_of(wanted)
    if not path.exists():
        return
    descriptor = take(wanted)
    if descriptor is None:
        return
    path.unlink(missing_ok=True)  # while it is locked: who waits for it looks again
    os.close(descriptor)
    with suppress(OSError):  # it holds others
        path.parent.rmdir()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
