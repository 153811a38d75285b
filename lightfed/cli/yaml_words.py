"""Lets jsonargparse read numbers and quoted words of YAML as they are written.

YAML 1.1 reads `1:30` as 90 and `010` as 8, and jsonargparse (as of 4.53) reads a quoted word again
where an argument has no type, or more than one: "0123" became 123, "no" False and "null" None.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import _loaders_dumpers, _typehints
from jsonargparse.typing import register_type

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_STR = "tag:yaml.org,2002:str"
_ZEROS = re.compile(r"[-+]?0[0-9_]+")
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$")


class Quoted(str):
    """A word in quotes that would be a number, a truth value or a list without them."""

    __slots__ = ()


def install() -> None:
    """Change the loader of jsonargparse; idempotent."""
    loader: Any = _loaders_dumpers.get_yaml_default_loader()
    if loader.yaml_constructors.get(_STR) is _word:
        return
    loader.add_constructor(_STR, _word)
    resolvers = {
        first: [(tag, _DECIMAL if tag == _INT else pattern) for tag, pattern in listed]
        for first, listed in loader.yaml_implicit_resolvers.items()
    }
    loader.yaml_implicit_resolvers = resolvers
    loader.add_constructor(_FLOAT, _number)
    register_type(Quoted, serializer=str, deserializer=Quoted)
    _typehints.sort_subtypes_for_union = partial(_words_first, _typehints.sort_subtypes_for_union)
    # `yaml.safe_dump` writes such a word with its quotes again.
    yaml.SafeDumper.add_representer(Quoted, yaml.SafeDumper.represent_str)


def _word(loader: Any, node: Any) -> str:
    text: str = loader.construct_scalar(node)
    if node.style not in ("'", '"'):
        return text
    plain = _loaders_dumpers.load_basic(text) is _loaders_dumpers.not_loaded
    plain &= loader.resolve(yaml.ScalarNode, text, (True, False)) == _STR
    plain &= not text.lstrip().startswith(("[", "{"))
    return text if plain else Quoted(text)


def _words_first(sort: Callable[..., Any], subtypes: Any, value: Any, *rest: Any) -> list[Any]:
    """The types of a union in the order in which a value is tried as each of them.

    A word in quotes is a word where a word may stand. Otherwise `None` takes "null", `int` takes
    "0123" and `bool` takes "no" before it is the turn of `str` or `Any`.
    """
    ordered = list(sort(subtypes, value, *rest))
    if isinstance(value, Quoted):
        ordered.sort(key=lambda kind: kind is not str and not _typehints.accepts_any_value(kind))
    return ordered


def _number(loader: Any, node: Any) -> Any:
    """A float; one of base 60, such as 1:30.5, stays a word."""
    if ":" in node.value:
        return loader.construct_scalar(node)
    return loader.construct_yaml_float(node)


def misread(node: Any, above: str = "") -> Iterator[tuple[str, str, int]]:
    """The key, the text and the line of each number that YAML does not read as it is written.

    `node` is the root of a file, as `yaml.compose` gives it, and `above` the key that it is below.
    """
    if isinstance(node, yaml.SequenceNode):
        for position, inner in enumerate(node.value):
            yield from misread(inner, f"{above}{position}.")
    elif isinstance(node, yaml.MappingNode):
        for name, inner in node.value:
            yield from misread(inner, f"{above}{name.value}.")
    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        sixty = node.tag in (_INT, _FLOAT) and ":" in node.value
        if sixty or _ZEROS.fullmatch(node.value):
            yield above.rstrip("."), node.value, node.start_mark.line + 1
