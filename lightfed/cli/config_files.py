"""What the parser leaves to do about configuration files: size, duplicate keys, items of lists."""

import json
import re
from collections.abc import Iterator, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightfed.utils.errors import UserError, require

_LARGEST = 100_000  # values of a file, counting every use of an alias
_ITEM = re.compile(r"--((?:\w+\.)+?\w+)\.(\d+)\.([\w.]+)(?:=(.*))?", re.DOTALL)


def check_files(words: Sequence[str]) -> None:
    """Reject keys that a file has twice: YAML would keep the last one.

    Also files that are nested too deeply, or that a few aliases make too large. A UserError names
    the key and the lines, or the file.
    """
    for path in _files(words):
        try:
            root = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
            size = _size(root, {})
        except (yaml.YAMLError, UnicodeDecodeError):
            continue  # the parser says what is wrong
        except RecursionError as error:
            raise UserError("--config", f"{path} is nested too deeply", "flatten it") from error
        require(size <= _LARGEST, "--config", f"{path} has {size:,} values", "use fewer aliases")
        for key, first, second in _duplicates(root, ""):
            lines = f"lines {first} and {second} of {path}"
            raise UserError(key, f"given twice, in {lines}", "keep one")


def with_items(words: Sequence[str]) -> list[str]:
    """A command line with the whole list for `--model.clients.0.count 3`.

    The list is that of the last file that has it, with all such changes. A UserError if no file has
    such an item.
    """
    left: list[str] = []
    lists: dict[str, list[Any]] = {}
    rest = iter(words)
    for word in rest:
        found = _ITEM.fullmatch(word)
        if found is None:
            left.append(word)
            continue
        key, position, inner, value = found.groups()
        items = lists.setdefault(key, _list(words, key))
        text = next(rest, "") if value is None else value
        whole = f"{key}.{position}.{inner}"
        require(int(position) < len(items), whole, f"{len(items)} items", "count from 0")
        _set(items[int(position)], inner.split("."), yaml.safe_load(text), whole)
    return left + [f"--{key}={json.dumps(items)}" for key, items in lists.items()]


def _files(words: Sequence[str]) -> Iterator[Path]:
    found = re.findall(r"(?:--config|-c)[\0=]([^\0]+)", "\0".join(words))
    yield from map(Path, filter(isfile, found))


def _list(words: Sequence[str], key: str) -> list[Any]:
    found: Any = None
    for path in _files(words):
        value: Any = yaml.safe_load(path.read_text("utf-8"))
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found = value if value is not None else found
    return json.loads(json.dumps(found)) if isinstance(found, list) else []  # aliases: own copies


def _set(item: Any, path: Sequence[str], value: Any, key: str) -> None:
    parts = list(path)
    while parts:
        require(isinstance(item, dict), key, "no such key in the file", "write it as class_path")
        if "class_path" in item and parts[0] not in ("class_path", "init_args"):
            parts.insert(0, "init_args")  # as the parser does outside of lists
        part = parts.pop(0)
        if not parts:
            item[part] = value
        item = item.setdefault(part, {})


def _size(node: Any, known: dict[int, int]) -> int:
    """Number of values in a file; that of an alias is counted once and added for each use.

    A RecursionError if it is nested too deeply, or an alias is inside of itself.
    """
    if id(node) not in known:
        items = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = (part for item in items for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = 1 + sum(_size(part, known) for part in inner)
    return known[id(node)]


def _duplicates(node: Any, above: str) -> Iterator[tuple[str, int, int]]:
    seen: dict[str, int] = {}
    if isinstance(node, yaml.SequenceNode):
        for position, inner in enumerate(node.value):
            yield from _duplicates(inner, f"{above}{position}.")
    for name, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        line, key = name.start_mark.line + 1, str(name.value)
        if key in seen and key != "<<":
            yield f"{above}{key}", seen[key], line
        seen[key] = line
        yield from _duplicates(inner, f"{above}{key}.")
