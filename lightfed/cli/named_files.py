"""Reads the configuration files that a command names, before the parser does."""

import re
from collections.abc import Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

# Words are joined by a zero character, which no word can contain.
_SEPARATOR = "\0"
_CONFIG_OPTION = re.compile(rf"(?:--config|-c)[{_SEPARATOR}=]([^{_SEPARATOR}]+)")


def files_of(words: Sequence[str]) -> list[Path]:
    """Return the existing configuration files that a command names, in its order."""
    names = _CONFIG_OPTION.findall(_SEPARATOR.join(words))
    return [Path(name) for name in names if isfile(name)]


def list_in_files(words: Sequence[str], key: str) -> list[Any]:
    """Return the list at a key of the last configuration file that has the key.

    Args:
        words: The words of the command, which name its files.
        key: The whole key, such as `model.clients`.

    Returns:
        The items; empty if no file has the key, or if its value is no list.
    """
    last_value: Any = None
    for path in files_of(words):
        try:
            value: Any = yaml.safe_load(path.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            # The parser reads the file again and says what is wrong with it.
            continue

        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            last_value = value

    return last_value if isinstance(last_value, list) else []
