"""Whole files: written at once or not at all, and read with every record held to its checksum.

torch's archives are zip files with a CRC-32 of every record. torch writes it and never looks at it;
here every reading of a file that may have lain on a bad disk does.
"""

import os
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from lightfed.utils.errors import UserError


def write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    """Make `path` whole or not at all.

    A temporary file beside it, flushed to disk, then renamed over it.

    Args:
        path: the target.
        write: called with a binary file.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    temporary = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        cause = error.__context__
        if isinstance(error, RuntimeError) and isinstance(cause, OSError):
            # torch's writer goes on after a failed write, and then only misses its place.
            raise OSError(*cause.args) from error
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Put the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(path: Path) -> None:
    """Read all of a file, and hold what is in it to its checksums.

    Mapped tensors are read when they are used: a spoilt one would then be believed, and one that
    is out of the disk's reach would be the death of the process (SIGBUS).

    Raises:
        UserError: something is missing, or not as it was written.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            spoilt = archive.testzip()
    except Exception as error:  # half a dozen types
        raise _unreadable(path, error) from error
    if spoilt is not None:
        raise _unreadable(path, f"the checksum of {spoilt} is wrong")


def read(path: Path) -> Any:
    """What torch has saved, if it is tensors and primitives alone; tensors are mapped, not read.

    Raises:
        UserError: it is not.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises half a dozen types for a broken archive
        raise _unreadable(path, error) from error


def _unreadable(path: Path, reason: object) -> UserError:
    told = re.split(r"\n|\. ", str(reason))[0]
    return UserError("ckpt_path", f"{path} cannot be read ({told})", "give another checkpoint")
