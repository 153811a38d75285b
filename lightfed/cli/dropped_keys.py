"""Finds keys that a user has written and that the parser drops, or reports without their name.

jsonargparse refuses an unknown key that has a value. It drops one that holds nothing, such as
`optimiser: {}`, without a word, and answers a key beside `class_path` by an error about the class.
"""

from collections.abc import Iterator, Mapping, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace

from lightfed.utils.errors import UserError

# The keys of a value that names a class.
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")


def check_empty_keys(words: Sequence[str], parsed: Namespace) -> None:
    """Refuse unknown keys that hold nothing, such as `{}`, which the parser drops.

    Args:
        words: The words of the command, which name its files.
        parsed: What the parser has made of them.

    Raises:
        UserError: Names the first such key.
    """
    for key, value in _written_values(words):
        # Put the value where it belongs in the whole configuration.
        whole = value
        if key:
            for name in reversed(key.split(".")):
                whole = {name: whole}

        for dropped_key in _dropped_keys(whole, parsed, above=""):
            raise UserError(dropped_key, found="no such key", fix="leave it out, or see --help")


def beside_class_path(words: Sequence[str]) -> UserError | None:
    """Return the error about a key beside `class_path` that belongs below `init_args`.

    The parser shows the whole value instead, or says that the class does not exist.

    Args:
        words: The words of the command, which name its files.

    Returns:
        The error about the first such key; None without one.
    """
    for key, value in _written_values(words):
        above = f"{key}." if key else ""
        for misplaced_key in _keys_beside_class_path(value, above):
            return UserError(
                key=misplaced_key,
                found="no such key beside class_path",
                fix="write it below init_args",
            )
    return None


def _keys_beside_class_path(value: Any, above: str) -> Iterator[str]:
    """Yield whole keys, at any depth of a value, that stand beside a `class_path`."""
    if isinstance(value, list):
        for position, item in enumerate(value):
            yield from _keys_beside_class_path(item, f"{above}{position}.")

    if isinstance(value, Mapping):
        if "class_path" in value:
            for name in value:
                if name not in _CLASS_KEYS:
                    yield f"{above}{name}"

        for name, inner in value.items():
            yield from _keys_beside_class_path(inner, f"{above}{name}.")


def _written_values(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command with their values; a whole file has an empty key."""
    remaining = iter(words)
    for word in remaining:
        if word != "-c" and not word.startswith("--"):
            continue

        key, has_value, text = word.lstrip("-").partition("=")
        if not has_value:
            text = next(remaining, "")
        if key in ("config", "c"):
            key = ""
            if isfile(text):
                # The parser refuses a file that is no text, and names it.
                text = Path(text).read_text("utf-8", errors="replace")

        try:
            yield key, yaml.safe_load(text)
        except yaml.YAMLError:
            # A word that is not YAML, such as a path, has no keys.
            continue


def _dropped_keys(written: Any, parsed: Any, above: str) -> Iterator[str]:
    """Yield whole keys of a value that hold nothing, and that the parser has not kept.

    Args:
        written: The value as the user wrote it.
        parsed: What the parser has made of it.
        above: The key of the value, with a dot at its end; empty for the whole configuration.
    """
    if isinstance(written, Mapping) and isinstance(parsed, list | tuple):
        # `--model.clients+={...}` adds an item to those of the files.
        yield from _dropped_from_all(written, parsed, above)

    elif isinstance(written, list) and isinstance(parsed, list | tuple):
        for position, item in enumerate(written):
            # If several files give items, this item can have become any of the parsed ones.
            candidates = [parsed[position]] if len(parsed) == len(written) else parsed
            yield from _dropped_from_all(item, candidates, f"{above}{position}.")

    elif isinstance(written, Mapping) and isinstance(parsed, Mapping | Namespace):
        yield from _dropped_from_mapping(written, parsed, above)


def _dropped_from_mapping(
    written: Mapping[Any, Any], parsed: Mapping[str, Any] | Namespace, above: str
) -> Iterator[str]:
    kept = vars(parsed) if isinstance(parsed, Namespace) else parsed

    is_class = "class_path" in kept
    if is_class:
        written_class = _class_name(written.get("class_path", ""))
        if written_class and written_class != _class_name(kept["class_path"]):
            # A later file or word has put another class in its place.
            return
        if not any(name in written for name in _CLASS_KEYS):
            # `--data.partition.alpha` is an argument of the class.
            kept = vars(kept.get("init_args") or Namespace())

    for written_name, value in written.items():
        # `clients+` appends to `clients`.
        name = str(written_name).removesuffix("+")
        if name in kept:
            yield from _dropped_keys(value, kept[name], f"{above}{name}.")
        elif _is_empty(value) and not (is_class and name in _CLASS_KEYS):
            yield f"{above}{name}"


def _dropped_from_all(item: Any, candidates: Sequence[Any], above: str) -> list[str]:
    """Return the keys of an item that none of the parsed candidates has kept."""
    if not candidates:
        return []
    dropped = [set(_dropped_keys(item, candidate, above)) for candidate in candidates]
    return sorted(set.intersection(*dropped))


def _class_name(path: Any) -> str:
    return str(path).rpartition(".")[2]


def _is_empty(value: Any) -> bool:
    """Return whether a value is a mapping without any value, at any depth."""
    return isinstance(value, Mapping) and all(map(_is_empty, value.values()))
