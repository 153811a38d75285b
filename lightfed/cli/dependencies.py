"""What the reading of commands has depended on, so that what was read can be kept.

A command is read by a parser that imports torch and Lightning, calls constructors, and may import a
user's own modules. Its result depends on three things: the files that were opened meanwhile
(`Opened`), the programs that are installed, and the circumstances of the process (`circumstances`).
"""

import hashlib
import importlib.util
import os
import platform
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightfed.utils.code_files import (
    digest_of_file,
    is_installed,
    modules_of_users,
    own_folders,
)

# The ends of what installers leave beside the packages in a folder; each installation renews it.
_MARKS_OF_INSTALLERS = (".dist-info", ".egg-info", ".egg-link", ".pth")

# Variables of a terminal, which differ from one window to the next and decide nothing here.
_OF_TERMINALS = frozenset(
    {
        "_", "COLUMNS", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "LINES", "OLDPWD", "PWD", "SHLVL",
        "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "STY", "TERM_SESSION_ID",
        "TMUX", "TMUX_PANE", "WINDOWID", "XDG_SESSION_ID",
    }
)  # fmt: skip


def circumstances() -> dict[str, Any]:
    """Return what a process reads any command by, as plain values: equal ones read alike.

    Call it before torch and Lightning are imported: they add to the environment.
    """
    environment = {}
    for name, value in os.environ.items():
        if name not in _OF_TERMINALS:
            environment[name] = value

    # The digest alone is kept, because variables can hold secrets.
    return {
        "python": [sys.version, sys.prefix, sys.flags.optimize],
        "machine": platform.node(),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "environment": _digest_of_text(repr(sorted(environment.items()))),
        "program": _digest_of_program(),
        "installed": _digest_of_text(repr(sorted(_marks_of_installers()))),
    }


def digest_of_code(*, of_users: bool) -> str:
    """Return a digest of this program, and of the code of its user.

    Runs with the same configuration and the same digest have the same bits, as long as the code
    reads no other file.

    Args:
        of_users: Whether to include the imported modules that no installer has put there.
    """
    digest = hashlib.blake2b(_digest_of_program().encode(), digest_size=16)
    for path in sorted(set(modules_of_users())) if of_users else ():
        digest.update(f"\0{path}\0".encode())
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


class Opened:
    """Notes the files that this process opens, apart from those of installed programs.

    The hook behind it stays to the end of the process: make one in a child that only reads.
    """

    def __init__(self) -> None:
        # By the absolute path of a file, its stamp when it was opened for the first time.
        self._stamp_of_path: dict[str, tuple[int, ...]] = {}
        self._listens = True

        # A module that was imported before may have been edited since.
        self._knows_all = not set(modules_of_users())
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._listens:
            return
        path = arguments[0]
        if isinstance(path, str | bytes):
            self._note(os.path.abspath(os.fsdecode(path)))

    def _note(self, path: str) -> None:
        source = _source_of(path)
        if source not in self._stamp_of_path and not is_installed(source):
            stamp = _stamp_of(source)
            if stamp is not None:
                self._stamp_of_path[source] = stamp

    def digests(self) -> dict[str, str] | None:
        """Return the digest of each file by its path.

        Returns:
            The digests. None if one of the files is too large, has changed since it was opened, or
            if modules of a user had been imported before this object was made.
        """
        if not self._knows_all:
            return None

        for path in modules_of_users():
            self._note(path)

        self._listens = False
        try:
            found = {}
            for path, stamp in self._stamp_of_path.items():
                digest = digest_of_file(path)
                if digest is None or _stamp_of(path) != stamp:
                    return None
                found[path] = digest
            return found
        finally:
            self._listens = True


def _source_of(path: str) -> str:
    """Return the source of a file of bytecode, whose content may be that of an older source."""
    if not path.endswith(".pyc"):
        return path
    try:
        return importlib.util.source_from_cache(path)
    except ValueError:
        return path


def _stamp_of(path: str) -> tuple[int, ...] | None:
    """Return what changes with a file; None if it is no plain file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _digest_of_program() -> str:
    """Return a digest of the sources of this program: a default in them can be edited."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in own_folders():
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path}\0".encode())
            digest.update(path.read_bytes())
            digest.update(b"\0")
    return digest.hexdigest()


def _marks_of_installers() -> Iterator[tuple[str, int]]:
    """Yield what installers have left on the path, with the time of the installation."""
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                for entry in entries:
                    if entry.name.endswith(_MARKS_OF_INSTALLERS):
                        yield entry.path, entry.stat().st_mtime_ns
        except OSError:
            continue


def _digest_of_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
