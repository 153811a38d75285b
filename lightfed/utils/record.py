"""What environment.json of a run folder may hold: it is read with types.

The folder of all runs is a user's: other programs write there, too, and other versions of lightfed.
"""

import json
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lightfed.utils import __version__

NAME = "environment.json"

# A larger file is not read: one of lightfed's has a few thousand bytes.
_MOST_BYTES = 1 << 24
# No number of things is larger.
_LARGEST_NUMBER = 1 << 53

Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    # True and False are whole numbers to Python.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= _LARGEST_NUMBER


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_anything(value: Any) -> bool:
    return True


def _by_name(check: Check) -> Check:
    """Return the check of an object whose values all pass another check."""

    def is_by_name(value: Any) -> bool:
        return isinstance(value, dict) and all(check(item) for item in value.values())

    return is_by_name


def _listed(check: Check) -> Check:
    """Return the check of a list whose items all pass another check."""

    def is_listed(value: Any) -> bool:
        return isinstance(value, list) and all(check(item) for item in value)

    return is_listed


def _fields(**checks: Check) -> Check:
    """Return the check of an object with these fields, each of its kind; it may have others."""

    def has_fields(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        return all(check(value.get(name)) for name, check in checks.items())

    return has_fields


# What is read somewhere, its kind in words, and its check. Other keys may be anything, and a key
# that is null counts as missing.
_KINDS: dict[str, tuple[str, Check]] = {
    "name": ("a text", _is_text),
    "config": ("a text", _is_text),
    "script": ("a text", _is_text),
    "job": ("a text", _is_text),
    "algorithm": ("a text", _is_text),
    "dataset": ("a text", _is_text),
    "personal": ("a text", _is_text),
    "evaluate_at": ("a text", _is_text),
    "lightfed": ("a text", _is_text),
    "commit": ("a text", _is_text),
    "torch": ("a text", _is_text),
    "earlier_torch": ("a text", _is_text),
    "seed": ("a whole number", _is_whole),
    "rounds": ("a whole number", _is_whole),
    "clients": ("a number of clients", _is_count),
    "evaluated_clients": ("a number of clients", _is_count),
    "ranks": ("a number of ranks", _is_count),
    "synthetic": ("true or false", _is_flag),
    "groups": ("numbers of clients by name", _by_name(_is_count)),
    "parameters": ("numbers by name", _by_name(_is_number)),
    "parts": ("a list of numbers", _listed(_is_number)),
    "experiment": (
        "a digest and settings",
        _fields(digest=_is_text, settings=_by_name(_is_text)),
    ),
    "code": ("digests by name", _by_name(_is_text)),
    "finished": ("rounds and limits", _fields(rounds=_is_whole, limits=_by_name(_is_anything))),
}


def parse(text: str) -> dict[str, Any]:
    """Return the record of a run from the text of its file.

    Raises:
        ValueError: If it is no such record. The message says what is wrong with it.
    """
    try:
        record = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"it holds {_in_words(record)} and no names")

    for name, (kind, fits) in _KINDS.items():
        value = record.get(name)
        if value is not None and not fits(value):
            raise ValueError(f"{name} is {_in_words(value)}, which is not {kind}")
    return record


def read_text(path: Path) -> str:
    """Return the text of a record.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is far too large, or no text.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return content.decode("utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """Return a run folder's record; empty if it is missing, half-written, or another program's."""
    try:
        return parse(read_text(folder / NAME))
    except (OSError, ValueError):
        return {}


def version_of(record: Mapping[str, Any]) -> str:
    """Return the version that wrote a record, with its commit: a number alone says little."""
    number = record.get("lightfed", "unknown")
    commit_of_record = record.get("commit", "unknown")
    return f"lightfed {number} (commit {commit_of_record})"


def by_another_version(record: Mapping[str, Any]) -> str:
    """Return which version has written a record, in words.

    Empty if it is this version, or the record does not say.
    """
    if "lightfed" not in record:
        return ""
    this = version_of({"lightfed": __version__, "commit": commit()})
    other = version_of(record)
    if other == this:
        return ""
    return f"it was written by {other}, this is {this}"


@cache
def commit() -> str:
    """Return the commit of this program, as git describes it; `unknown` outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    folder = Path(__file__).parent
    try:
        finished = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return finished.stdout.strip() or "unknown"


def _in_words(value: Any) -> str:
    """Return a value in a few words."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
