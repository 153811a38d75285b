"""The runs that commands ask for, kept beside them, so that finished ones are found at once.

To read a command takes the seconds in which torch and Lightning are imported. Where all runs of a
sweep or of a comparison are finished, nothing else needs them. So what was read is kept in a file
beside the runs, with all that it depends on. What is kept answers only whether runs are finished
and where: if a single one is missing, all commands are read again before anything is trained.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightfed.cli.dependencies import circumstances
from lightfed.cli.named_files import files_of
from lightfed.cli.shipped import with_paths
from lightfed.cli.wanted import Wanted
from lightfed.utils.code_files import digest_of_file
from lightfed.utils.errors import UserError

# The folder of the files, in the folder of the runs.
FOLDER = ".known"

_ROOT = "trainer.default_root_dir"
_DEFAULT_ROOT = "runs"


class KnownRuns:
    """What a list of commands asks for, if it was read before under the same circumstances.

    Make it before torch and Lightning are imported.

    Args:
        commands: The words of each command, `fit` first.

    Attributes:
        path: The file in which the runs are kept.
    """

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = [list(words) for words in commands]
        self._circumstances = circumstances()

        # A guess. Where it is wrong, nothing is found, and nothing is kept.
        self._root = _root_of(commands[0]) if commands else Path(_DEFAULT_ROOT)
        name = hashlib.blake2b(json.dumps(self._commands).encode(), digest_size=8).hexdigest()
        self.path = self._root / FOLDER / f"{name}.json"

    def recall(self) -> list[Wanted] | None:
        """Return the run of each command; None if they are not known, or not any more."""
        try:
            kept = json.loads(self.path.read_text("utf-8"))
            checked = kept["digest"] == _digest_of(kept["content"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # It is missing, damaged, or another program's.
            return None

        content = kept["content"]
        if not checked or content["circumstances"] != self._circumstances:
            return None
        for path, digest in content["files"].items():
            if digest_of_file(path) != digest:
                return None

        runs = []
        for words, values in zip(self._commands, content["runs"], strict=True):
            runs.append(Wanted(words=tuple(words), **values | {"root": Path(values["root"])}))
        return runs

    def keep(self, runs: Sequence[Wanted]) -> None:
        """Keep what the commands ask for, if all is known that it depends on.

        A folder that does not exist or cannot be written is left as it is.

        Args:
            runs: The run of each command, as it was read.
        """
        files: dict[str, str] = {}
        for wanted in runs:
            if wanted.files is None:
                return
            for path, digest in wanted.files.items():
                # A file that was edited between two commands has no single digest.
                if files.setdefault(path, digest) != digest:
                    return

        if not runs or runs[0].root != self._root or not self._root.is_dir():
            return

        content = {
            "circumstances": self._circumstances,
            "files": files,
            "runs": [_values_of(wanted) for wanted in runs],
        }
        # A value that JSON would change, such as a tuple, is not kept.
        try:
            is_plain = repr(json.loads(json.dumps(content))) == repr(content)
        except (TypeError, ValueError):
            return
        if not is_plain:
            return

        # Imported here, because it needs torch. A process that has read the commands has it.
        from lightfed.utils.atomic_io import write_atomically

        text = json.dumps({"digest": _digest_of(content), "content": content})
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            write_atomically(self.path, lambda file: file.write(text.encode()))


def _values_of(wanted: Wanted) -> dict[str, Any]:
    """Return a run as plain values, without what its command and the file say already."""
    return {
        "root": str(wanted.root),
        "name": wanted.name,
        "options": dict(wanted.options),
        "limits": dict(wanted.limits),
        "ranks": wanted.ranks,
        "values": dict(wanted.values),
    }


def _digest_of(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _root_of(words: Sequence[str]) -> Path:
    """Return the folder of the runs as a command seems to name it, without its parser."""
    root: Any = _DEFAULT_ROOT
    with suppress(UserError, OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        for path in files_of(with_paths(words)):
            config = yaml.safe_load(path.read_text("utf-8"))
            trainer = config.get("trainer") if isinstance(config, dict) else None
            if isinstance(trainer, dict):
                root = trainer.get("default_root_dir", root)

    for value in _given(words, f"--{_ROOT}"):
        root = value
    return Path(str(root)).expanduser()


def _given(words: Sequence[str], option: str) -> Iterator[str]:
    """Yield the values of an option among the words of a command."""
    for position, word in enumerate(words):
        if word == option and position + 1 < len(words):
            yield words[position + 1]
        if word.startswith(f"{option}="):
            yield word.removeprefix(f"{option}=")
