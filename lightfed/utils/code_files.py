"""The files of code that a run consists of: those of lightfed, and modules of its user."""

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

# The packages of this program. They change without another number while somebody works on them.
_OWN_PACKAGES = ("lightfed", "lightfed_kernels")

# Files of the system that no command is written in.
_OF_THE_SYSTEM = ("/proc/", "/sys/", "/dev/")

# A larger file is data. To read it again would take longer than it saves.
_MOST_BYTES = 1 << 22


def digest_of_file(path: str) -> str | None:
    """Return a digest of the content of a file; None if it cannot be read or is too large."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError:
        return None
    if len(content) > _MOST_BYTES:
        return None
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def modules_of_users() -> Iterator[str]:
    """Yield the files of imported modules that belong to no installed program."""
    installed = _beginnings_of_installed()
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str):
            continue
        # Nearly all of some thousands, so their paths are not made absolute first.
        if name.startswith(installed) and ".." not in name:
            continue
        path = os.path.abspath(name)
        # Some modules of libraries, made in memory, name a file that does not exist.
        if not is_installed(path) and os.path.isfile(path):
            yield path


def is_installed(path: str) -> bool:
    """Return whether `circumstances` covers a file: it belongs to an installed program."""
    return path.startswith(_beginnings_of_installed())


@cache
def _beginnings_of_installed() -> tuple[str, ...]:
    """Return what the paths of files of installed programs, and of the system, begin with."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [sysconfig.get_path("scripts"), *map(str, own_folders())]

    found = []
    for folder in folders:
        found += [folder + os.sep, os.path.realpath(folder) + os.sep]
    return (*dict.fromkeys(found), *_OF_THE_SYSTEM)


@cache
def own_folders() -> tuple[Path, ...]:
    folders = []
    for name in _OWN_PACKAGES:
        # This imports nothing.
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            folders.append(Path(found.origin).parent)
    return tuple(folders)


def code_of_users() -> dict[str, str]:
    """Return the digest of each imported module of the user, by its path.

    A path below the working directory is relative to it.
    """
    digests = {}
    for path in sorted(set(modules_of_users())):
        digest = digest_of_file(path)
        if digest is not None:
            digests[_short(path)] = digest
    return digests


def edited(code: Mapping[str, str]) -> list[str]:
    """Return the paths of modules whose files have changed since; a file that is gone has not.

    Args:
        code: What `code_of_users` returned then.
    """
    changed = []
    for path, digest in code.items():
        now = digest_of_file(path)
        if now is not None and now != digest:
            changed.append(path)
    return changed


def _short(path: str) -> str:
    """Return a path relative to the working directory if it lies below."""
    folder = os.getcwd() + os.sep
    return path.removeprefix(folder)
