"""What the parser leaves to do about configurations.

Duplicate keys of files, items of lists, and values of which nothing can be made.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from inspect import Parameter, signature
from math import isfinite
from os.path import isfile
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any, get_args

import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace

from lightfed.cli.errors import annotations, base_of, class_hint, files_of, list_in_files
from lightfed.cli.shipped import is_study
from lightfed.cli.yaml_words import misread
from lightfed.utils.errors import UserError, require

_ITEM = re.compile(r"--((?:\w+\.)+?\w+)\.(\d+)\.([\w.]+)(?:=(.*))?", re.DOTALL)
_OF_CLASSES = ("class_path", "init_args", "dict_kwargs")
_LINKED = ("num_classes", "input_shape", "rate")  # of the run, if a network does not give them


def check_files(words: Sequence[str]) -> None:
    """Check each configuration that a command line names.

    Raises:
        UserError: a file is a study, or YAML would read it otherwise than it is written.
    """
    for path in files_of(words):
        if is_study(path):
            found = f"{path} is a study of several methods, and no configuration of a run"
            raise UserError("--config", found, f"run it by `lightfed study {path}`")
        check_file(path, "--config")


def check_file(path: Path, key: str) -> None:
    """Reject a file that YAML would read otherwise than it is written; names the lines.

    These are keys that a file has twice, of which YAML would keep the last one, and numbers of base
    60 or with leading zeros, which it would convert. A file that is not YAML passes: who reads it
    next says what is wrong.

    Args:
        path: The file.
        key: What names the file, for the error.

    Raises:
        UserError: YAML would read the file otherwise.
    """
    try:
        root = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
        duplicates = list(_duplicates(root, ""))
        numbers = list(misread(root))
    except RecursionError as error:
        fix = "write it flat, as the shipped configurations are"
        raise UserError(key, f"{path} is nested too deeply", fix) from error
    except (yaml.YAMLError, UnicodeDecodeError):
        return
    except _HoldsItself as error:
        found = f"the value at line {error.line} of {path} holds itself, by an anchor"
        raise UserError(key, found, "write it out, without the alias") from error

    for twice, first, second in duplicates:
        lines = f"lines {first} and {second} of {path}"
        raise UserError(twice, f"given twice, in {lines}", "keep one")
    for misread_key, written, line in numbers:
        found = f"{written}, in line {line} of {path}, which YAML reads as another number"
        fix = "write it in decimal without leading zeros, or a word in quotes"
        raise UserError(misread_key, found, fix)


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
        listed = json.dumps(list_in_files(words, key))
        items = lists.setdefault(key, json.loads(listed))  # without aliases of YAML
        text = next(rest, "") if value is None else value
        whole = f"{key}.{position}.{inner}"
        require(int(position) < len(items), whole, f"{len(items)} items", "count from 0")
        try:
            given = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(whole, f"{text!r}, which is no YAML", "close its brackets") from error
        _set(items[int(position)], inner.split("."), given, whole)
    return left + [f"--{key}={json.dumps(items)}" for key, items in lists.items()]


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


def check_empty_keys(words: Sequence[str], parsed: Namespace) -> None:
    """Reject unknown keys that hold nothing, such as `{}`: the parser drops them without a word.

    It refuses all others by itself.

    Args:
        words: The command line, with its files.
        parsed: What the parser has made of it.

    Raises:
        UserError: Names the first such key.
    """
    for key, value in _written(words):
        above = key.split(".") if key else []
        for part in reversed(above):
            value = {part: value}
        for dropped in _dropped(value, parsed, ""):
            raise UserError(dropped, "no such key", "leave it out, or see --help")


def beside_class_path(words: Sequence[str]) -> UserError | None:
    """The error of a key that stands beside a class_path, and not below its init_args.

    The parser shows the whole value instead, or says that the class is none.
    """
    for key, value in _written(words):
        for beside in _beside(value, f"{key}." if key else ""):
            return UserError(beside, "no such key beside class_path", "write it below init_args")
    return None


def _beside(value: Any, above: str) -> Iterator[str]:
    inner: Any = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, Mapping):
        inner = value.items()
        if "class_path" in value:
            yield from (f"{above}{name}" for name in value if name not in _OF_CLASSES)
    for name, below in inner:
        yield from _beside(below, f"{above}{name}.")


def _written(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The values that a command line and its files give, by their keys; a file's key is empty."""
    rest = iter(words)
    for word in rest:
        if word != "-c" and not word.startswith("--"):
            continue
        key, equals, text = word.lstrip("-").partition("=")
        if not equals:
            text = next(rest, "")
        if key in ("config", "c"):
            key = ""
            text = Path(text).read_text("utf-8") if isfile(text) else text
        try:
            yield key, yaml.safe_load(text)
        except yaml.YAMLError:
            continue  # a word that is no YAML holds no keys


def _dropped(given: Any, parsed: Any, above: str) -> Iterator[str]:
    """Keys of a value that hold nothing, and are not in what the parser has made of the value."""
    if isinstance(given, Mapping) and isinstance(parsed, list | tuple):
        # `--model.clients+={...}` adds one to those of the files.
        yield from _dropped_by_all(given, parsed, above)
        return
    if isinstance(given, list) and isinstance(parsed, list | tuple):
        for position, item in enumerate(given):
            # Where several files give items, it may be any of them.
            others = [parsed[position]] if len(parsed) == len(given) else parsed
            yield from _dropped_by_all(item, others, f"{above}{position}.")
        return
    if not isinstance(given, Mapping) or not isinstance(parsed, Mapping | Namespace):
        return

    known = vars(parsed) if isinstance(parsed, Namespace) else parsed
    is_class = "class_path" in known
    if is_class and _class_name(given.get("class_path", "")) not in (
        "",
        _class_name(known["class_path"]),
    ):
        return  # another file, or a word, has another class in its place
    if is_class and not any(name in given for name in _OF_CLASSES):
        # `--data.partition.alpha` is an argument of the class.
        known = vars(known.get("init_args") or Namespace())
    for name, value in given.items():
        plain = str(name).removesuffix("+")
        if plain in known:
            yield from _dropped(value, known[plain], f"{above}{plain}.")
        elif _is_empty(value) and not (is_class and plain in _OF_CLASSES):
            yield f"{above}{plain}"


def _dropped_by_all(item: Any, others: Sequence[Any], above: str) -> list[str]:
    """Keys of an item that none of the others has kept."""
    dropped = [set(_dropped(item, other, above)) for other in others]
    return sorted(set.intersection(*dropped)) if dropped else []


def _class_name(path: Any) -> str:
    return str(path).rpartition(".")[2]


def _is_empty(value: Any) -> bool:
    """Whether a mapping holds nothing, however deep."""
    return isinstance(value, Mapping) and all(map(_is_empty, value.values()))


class _HoldsItself(Exception):
    """A value of a file holds itself: it has no end."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line}")
        self.line = line


def _duplicates(
    node: Any, above: str, around: tuple[Any, ...] = ()
) -> Iterator[tuple[str, int, int]]:
    """Keys that a mapping has twice, with both lines; `around` are the nodes that hold it."""
    if any(node is other for other in around):
        raise _HoldsItself(node.start_mark.line + 1)
    around = (*around, node)
    seen: dict[str, int] = {}
    if isinstance(node, yaml.SequenceNode):
        for position, inner in enumerate(node.value):
            yield from _duplicates(inner, f"{above}{position}.", around)
    for name, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        line, key = name.start_mark.line + 1, str(name.value)
        if key in seen and key != "<<":
            yield f"{above}{key}", seen[key], line
        seen[key] = line
        yield from _duplicates(inner, f"{above}{key}.", around)


def check_arguments(given: Any, owner: Any, key: str) -> None:
    """Reject values of the arguments of a class or function, `given` below a key, and in them.

    No value where one is needed, numbers that are not finite, a class that is only a base of
    others. A UserError names the whole key.
    """
    wanted, known = annotations(owner), signature(owner).parameters
    for name, value in vars(given).items() if isinstance(given, Namespace) else given.items():
        default = known[name].default if name in known else Parameter.empty
        if value is default or (isinstance(value, float) and value == default):
            continue
        if value is None and name in wanted and name not in _LINKED:
            fix = "give one, or leave the key out"
            require(_takes_none(wanted[name]), f"{key}.{name}", "no value", fix)
        _check(value, wanted.get(name), f"{key}.{name}")


def _check(value: Any, wanted: Any, key: str) -> None:
    if isinstance(value, float):
        require(isfinite(value), key, value, "give a finite number")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _check(item, wanted, f"{key}.{position}")
    elif isinstance(value, Mapping | Namespace):
        base = base_of(wanted)
        if "class_path" in value:
            _check_class(value, wanted, key)
        elif is_dataclass(base):
            check_arguments(value, base, key)


def _check_class(given: Any, wanted: Any, key: str) -> None:
    try:
        owner = resolve_name(given["class_path"])
        signature(owner)
    except (ImportError, AttributeError, TypeError, ValueError):
        return  # words of a user's own, or a class of C
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in signature(owner).parameters.values())
    for name in given.get("dict_kwargs") or {}:
        found, fix = f"no such argument of {owner.__name__}", "leave it out"
        fits = takes_any or name in signature(owner).parameters
        require(fits, f"{key}.dict_kwargs.{name}", found, fix)
    plain = owner is base_of(wanted) and owner.__module__.startswith(("torch.", "lightning."))
    require(not plain, key, f"{owner.__name__} alone does nothing", class_hint("", wanted))
    check_arguments(given.get("init_args") or {}, owner, f"{key}.init_args")


def _takes_none(wanted: Any) -> bool:
    inner = get_args(wanted)
    return wanted in (Any, None, NoneType) or any(a is NoneType or _takes_none(a) for a in inner)
