"""What a command has printed, kept beside the runs, so that it can be said again at once.

A comparison of finished runs reads their tables, computes intervals and draws a page, for which it
imports pandas, scipy and more. Where none of that could give anything new, the command prints what
it printed last time. What is kept holds only as long as nothing has changed that the command has
read, looked through or written.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from typing_extensions import override

from lightfed.cli.dependencies import Opened, circumstances
from lightfed.cli.known_runs import FOLDER
from lightfed.utils.code_files import digest_of_file

# A process that trains, or reads commands by their parser, has imported it.
_OF_WORK = "torch"

# The table that every run folder has.
_TABLE_OF_A_RUN = "metrics.csv"


def said_again(words: Sequence[str], folder: Path, run: Callable[[], int]) -> int:
    """Run a command, or print what it has printed before if nothing has changed since.

    Args:
        words: The words of the command, its name first.
        folder: Where to keep what it prints. Without this folder nothing is kept.
        run: Runs the command and returns its status.

    Returns:
        The exit status.
    """
    if _OF_WORK in sys.modules or not folder.is_dir():
        return run()

    known = KnownOutput(words, folder)
    printed = known.recall()
    if printed is not None:
        print(printed, end="")
        return 0

    with known.heard():
        status = run()
    if status == 0:
        known.keep()
    return status


class KnownOutput:
    """What a command prints on standard output, with all that this depends on.

    Args:
        words: The words of the command, its name first.
        folder: The folder that keeps it, which exists.

    Attributes:
        path: The file in which it is kept.
    """

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        # Tables are as wide as the terminal, and have colors there.
        terminal = [sys.stdout.isatty(), shutil.get_terminal_size().columns]
        self._asked = {
            "words": list(words),
            "terminal": terminal,
            "circumstances": circumstances(),
        }
        name = hashlib.blake2b(json.dumps(list(words)).encode(), digest_size=8).hexdigest()
        self.path = folder / FOLDER / f"{name}.said"
        self._files: _Touched | None = None
        self._printed: list[str] = []
        self._has_warned = False

    def recall(self) -> str | None:
        """Return what the command has printed; None if it is not known, or not any more."""
        try:
            kept = json.loads(self.path.read_text("utf-8"))
            content = kept["content"]
            is_whole = kept["digest"] == _digest_of(content)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # It is missing, damaged, or another program's.
            return None

        if not is_whole or content["asked"] != self._asked:
            return None
        for path, digest in content["files"].items():
            if digest_of_file(path) != digest:
                return None
        for path, entries in content["folders"].items():
            if _entries_of(path) != entries:
                return None
        printed: str = content["printed"]
        return printed

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Note what is printed in a block, and the files that are read and written meanwhile."""
        self._files = _Touched()
        output, errors = sys.stdout, sys.stderr
        sys.stdout = cast(TextIO, _Heard(output, self._printed.append))
        sys.stderr = cast(TextIO, _Heard(errors, self._warned))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = output, errors

    def _warned(self, text: str) -> None:
        self._has_warned = True

    def keep(self) -> None:
        """Keep what was printed, unless the command has worked, warned, or read too much."""
        assert self._files is not None, "nothing was heard"
        if _OF_WORK in sys.modules or self._has_warned:
            return

        # The folder is made before the entries of others are noted.
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
        files = self._files.all_digests()
        if files is None:
            return
        content = {
            "asked": self._asked,
            "files": files,
            "folders": {folder: _entries_of(folder) for folder in _folders_of_runs(files)},
            "printed": "".join(self._printed),
        }
        text = json.dumps({"digest": _digest_of(content), "content": content})

        # A file of its own first, so that nobody reads half of it. That of `atomic_io` needs torch.
        unfinished = self.path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            unfinished.write_text(text, "utf-8")
            unfinished.replace(self.path)


class _Touched(Opened):
    """Notes also which files this process writes, whose content is what it has made of them."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        super().__init__()

    @override
    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            # Also that of `os.replace`, by which files are written as a whole.
            source, target = (os.path.abspath(os.fsdecode(path)) for path in arguments[:2])
            self._written.discard(source)
            self._written.add(target)
        elif event == "open" and isinstance(arguments[0], str | bytes) and _writes(arguments):
            self._written.add(os.path.abspath(os.fsdecode(arguments[0])))
        else:
            super()._hear(event, arguments)

    def all_digests(self) -> dict[str, str] | None:
        """Return the digests of all files that were read or written; None if one is missing."""
        digests = self.digests()
        if digests is None:
            return None
        for path in self._written:
            digest = digest_of_file(path)
            if digest is None:
                return None
            digests[path] = digest
        return digests


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Return whether the arguments of an audited `open` are those of a file to be written."""
    mode, flags = arguments[1:3]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


class _Heard:
    """A stream whose texts are also given to a function."""

    def __init__(self, stream: TextIO, hear: Callable[[str], object]) -> None:
        self._stream = stream
        self._hear = hear

    def write(self, text: str) -> int:
        """Write a text."""
        self._hear(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _folders_of_runs(paths: Iterable[str]) -> list[str]:
    """Return the folders of the runs that were read, and the folders that these are in.

    A file that a run lacked may be there the next time, and a folder may have another run.
    """
    folders: dict[str, None] = {}
    for path in paths:
        folder, name = os.path.split(path)
        if name == _TABLE_OF_A_RUN:
            folders[folder] = None
            folders[os.path.dirname(folder)] = None
    return list(folders)


def _entries_of(folder: str) -> list[list[Any]] | None:
    """Return the names in a folder, with the times at which folders in it got or lost a file."""
    entries: list[list[Any]] = []
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if entry.name.startswith("."):
                    continue
                changed = entry.stat().st_mtime_ns if entry.is_dir() else 0
                entries.append([entry.name, changed])
    except OSError:
        return None
    return sorted(entries)


def _digest_of(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
