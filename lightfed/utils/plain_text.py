"""Texts from files, as they are drawn and printed: without what no name needs."""

import unicodedata
from functools import cache
from typing import Any


def plain(text: str) -> str:
    """A text without control characters, surrogates and characters that are not assigned.

    They may move a terminal's cursor, turn the direction of what follows, or be more than a writer
    of pictures can draw. Ends of lines and tabs are spaces.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_plain, text))


@cache
def _plain(character: str) -> str:
    category = unicodedata.category(character)
    if category[0] == "Z" or character in "\t\n\r":
        return " "
    return "" if category[0] == "C" else character


def all_plain(value: Any) -> Any:
    """The same mappings and lists with plain texts; other values stay."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {all_plain(name): all_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [all_plain(inner) for inner in value]
    return value
