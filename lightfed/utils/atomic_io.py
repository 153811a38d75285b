"""Atomic file writes, and reads that verify the checksum of every record.

torch's archives are zip files with a CRC-32 per record. torch writes the CRC but never checks it.
Here every read of a file that may have been on a bad disk checks it.
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
    """Write all of a file, or leave it untouched.

    A temporary file next to it is written, flushed to disk and renamed.

    Args:
        path: The file.
        write: Writes the content to a binary file that it is called with.

    Raises:
        OSError: If it cannot be written. No partial file is left.
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
            # torch's writer carries on after a failed write, and raises about its position instead.
            raise OSError(*cause.args) from error
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a renamed file is found after a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(path: Path) -> None:
    """Read a whole file and verify its checksums.

    Mapped tensors are read on use: a corrupt one would go unnoticed, and one that the disk cannot
    read would kill the process (SIGBUS).

    Raises:
        Damaged: If the file is missing, truncated or corrupt.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            corrupt = archive.testzip()
    except Exception as error:  # half a dozen types
        raise _unreadable(path, error) from error
    if corrupt is not None:
        raise _unreadable(path, f"the checksum of {corrupt} is wrong")


def read(path: Path) -> Any:
    """Load a torch file of tensors and primitives, memory-mapped.

    Raises:
        Damaged: If it cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises half a dozen types for a broken archive
        raise _unreadable(path, error) from error


class Damaged(UserError):
    """A file that was whole once cannot be read: truncated, corrupt, or on a bad block."""


def _unreadable(path: object, why: object) -> Damaged:
    first_sentence = re.split(r"\n|\. ", str(why))[0]
    return Damaged(
        key="ckpt_path",
        found=f"{path} cannot be read ({first_sentence})",
        fix="give another checkpoint",
    )
