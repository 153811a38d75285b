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
_MOST_BYTES = 1 << 24  # of a file that is read: one of lightfed's has a few thousand
_MOST = 1 << 53  # of a number of things; more than anything has
Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _by_name(check: Check) -> Check:
    def checked(value: Any) -> bool:
        return isinstance(value, dict) and all(map(check, value.values()))

    return checked


def _listed(check: Check) -> Check:
    def checked(value: Any) -> bool:
        return isinstance(value, list) and all(map(check, value))

    return checked


def _anything(value: Any) -> bool:
    return True


def _fields(**checks: Check) -> Check:
    """An object with these fields, each of its kind; it may have others."""

    def checked(value: Any) -> bool:
        fits = isinstance(value, dict)
        return fits and all(check(value.get(name)) for name, check in checks.items())

    return checked


# What is read somewhere, its kind in words, and its check; null and other keys may be anything.
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
    "finished": ("rounds and limits", _fields(rounds=_is_whole, limits=_by_name(_anything))),
}


def parse(text: str) -> dict[str, Any]:
    """The record of a run from the text of its file; a ValueError says what is wrong with it."""
    try:
        recorded = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(recorded, dict):
        raise ValueError(f"it holds {_kind(recorded)} and no names")
    for name, (wanted, fits) in _KINDS.items():
        value = recorded.get(name)
        if value is not None and not fits(value):
            raise ValueError(f"{name} is {_kind(value)}, which is not {wanted}")
    return recorded


def read_text(path: Path) -> str:
    """The text of a record; a ValueError if the file is far too large, or no text."""
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return content.decode("utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """A run folder's record; empty if it is missing, half-written, or another program's."""
    try:
        return parse(read_text(folder / NAME))
    except (OSError, ValueError):
        return {}


def version_of(recorded: Mapping[str, Any]) -> str:
    """The version of lightfed that wrote a record, with its commit: a number alone says little."""
    number, commit = recorded.get("lightfed", "unknown"), recorded.get("commit", "unknown")
    return f"lightfed {number} (commit {commit})"


def by_another_version(recorded: Mapping[str, Any]) -> str:
    """Which version has written a record, in words; empty if it is this one, or does not say."""
    this = version_of({"lightfed": __version__, "commit": commit()})
    if "lightfed" not in recorded or version_of(recorded) == this:
        return ""
    return f"it was written by {version_of(recorded)}, this is {this}"


@cache
def commit() -> str:
    """The commit of this program, as git describes it; `unknown` outside of a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _kind(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
