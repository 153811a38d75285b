"""Atomic file writes, and reads that verify the checksum of every record.

torch's archives are zip files with a CRC-32 per record. torch writes the CRC but never checks it.
Here every read of a file that may have been on a bad disk checks it.
"""

import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from lightfed.utils.errors import UserError, reason


def write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    """Write all of `path` or leave it untouched.

    Writes a temporary file next to it, flushes it to disk and renames it. `write` is called with a
    binary file. If it fails, an OSError, no partial file is left.
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
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(path: Path) -> None:
    """Read a whole file and verify its checksums.

    Mapped tensors are read on use: a corrupt one would go unnoticed, and one that the disk cannot
    read would kill the process (SIGBUS). A UserError if the file is missing, truncated or corrupt.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            corrupt = archive.testzip()
    except Exception as error:  # half a dozen types
        raise _unreadable(path, error) from error
    if corrupt is not None:
        raise _unreadable(path, f"the checksum of {corrupt} is wrong")


def read(path: Path) -> Any:
    """Load a torch file of tensors and primitives, memory-mapped; a UserError if it is broken."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises half a dozen types for a broken archive
        raise _unreadable(path, error) from error


@contextmanager
def checked(path: object) -> Iterator[None]:
    """Report a value that the block cannot use as that of a damaged file.

    A file may be edited, or be written by a program with a mistake: its checksums are then right. A
    UserError names the file if the block raised another error.
    """
    try:
        yield
    except UserError:
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise _unreadable(path, reason(e)) from e


def check_like(found: Any, example: Any, name: str) -> None:
    """Compare a value from a file with an example: keys, types, shapes; counts are 0 or more.

    The value may have more keys; None in the example stands for anything. A ValueError names the
    part of `name` that differs.
    """
    fits = example is None or type(found) is type(example) or isinstance(example, Mapping)
    if isinstance(example, Mapping):
        fits = isinstance(found, Mapping) and found.keys() >= example.keys()
        for key, value in example.items() if fits else ():
            check_like(found[key], value, f"{name}.{key}")
    elif fits and isinstance(example, Tensor):
        fits = found.shape == example.shape and found.dtype == example.dtype
    elif fits and isinstance(example, int):
        fits = found >= 0
    if not fits:
        raise ValueError(f"{name} is {shorten(repr(found), 60)}")


def _unreadable(path: object, why: object) -> UserError:
    short = re.split(r"\n|\. ", str(why))[0]
    return UserError("ckpt_path", f"{path} cannot be read ({short})", "give another checkpoint")
