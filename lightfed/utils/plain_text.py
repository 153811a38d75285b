"""Texts from files, as they are drawn and printed: without what no name needs."""

import unicodedata
from functools import cache
from typing import Any


def plain(text: str) -> str:
    """Return a text without control characters, surrogates and unassigned characters.

    They may move a terminal's cursor, turn the direction of what follows, or be more than a writer
    of pictures can draw. Ends of lines and tabs become spaces.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_plain_character(character) for character in text)


@cache
def _plain_character(character: str) -> str:
    """Return a character, a space in its place, or nothing."""
    category = unicodedata.category(character)
    is_separator = category[0] == "Z"
    if is_separator or character in "\t\n\r":
        return " "
    is_control_or_unassigned = category[0] == "C"
    return "" if is_control_or_unassigned else character


def all_plain(value: Any) -> Any:
    """Return the same mappings and lists with plain texts; other values stay."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {all_plain(name): all_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_plain(item) for item in value]
    return value
