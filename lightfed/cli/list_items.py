"""Lets a command change one item of a list: `--model.clients.0.count 3`.

jsonargparse can replace a list or append to it, but not change an item. Here such words are applied
to the list of the configuration files, and the parser is given the whole list.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightfed.cli.named_files import list_in_files
from lightfed.utils.errors import UserError

_ITEM_OPTION = re.compile(
    r"--(?P<list>(?:\w+\.)+?\w+)\.(?P<position>\d+)\.(?P<inner>[\w.]+)(?:=(?P<value>.*))?",
    re.DOTALL,
)


def with_items(words: Sequence[str]) -> list[str]:
    """Return a command with whole lists in place of the words that change items of them.

    Where several files have the list, it is the last one that is changed: the parser would use
    that one too.

    Args:
        words: The words of the command, such as `--model.clients.0.count 3`.

    Returns:
        The other words, and after them a word `--model.clients=[...]` for each changed list.

    Raises:
        UserError: No file has an item at that position, the value is not YAML, or the item has no
            keys.
    """
    other_words: list[str] = []
    changed_lists: dict[str, list[Any]] = {}

    remaining = iter(words)
    for word in remaining:
        option = _ITEM_OPTION.fullmatch(word)
        if option is None:
            other_words.append(word)
            continue

        list_key = option["list"]
        if list_key not in changed_lists:
            # Copy by JSON: an item that the file repeats by an alias must change only once.
            changed_lists[list_key] = json.loads(json.dumps(list_in_files(words, list_key)))
        items = changed_lists[list_key]

        position = int(option["position"])
        item_key = f"{list_key}.{position}.{option['inner']}"
        if position >= len(items):
            raise UserError(item_key, found=f"{len(items)} items", fix="count from 0")

        text = option["value"]
        if text is None:
            text = next(remaining, "")

        _set(items[position], option["inner"].split("."), _parsed(text, item_key), item_key)

    list_words = [f"--{key}={json.dumps(items)}" for key, items in changed_lists.items()]
    return other_words + list_words


def _parsed(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        found = f"{text!r}, which is not YAML"
        raise UserError(key, found, fix="close its brackets and quotes") from error


def _set(item: Any, names: Sequence[str], value: Any, key: str) -> None:
    """Set a value in an item of a list.

    Args:
        item: The item, which is changed.
        names: The names of the keys that lead to the value.
        value: The new value.
        key: The whole key, for the error.
    """
    remaining = list(names)
    mapping = item
    while True:
        if not isinstance(mapping, dict):
            raise UserError(key, found="no such key in the file", fix="write it as class_path")

        if "class_path" in mapping and remaining[0] not in ("class_path", "init_args"):
            # Outside of lists, the parser lets a user leave out `init_args`.
            remaining.insert(0, "init_args")

        name = remaining.pop(0)
        if not remaining:
            mapping[name] = value
            return
        mapping = mapping.setdefault(name, {})
