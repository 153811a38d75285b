"""Lets jsonargparse read numbers and quoted words of YAML as they are written.

YAML 1.1 reads `1:30` as 90 and `010` as 8. jsonargparse (as of 4.53) reads a quoted word again if
an argument has no type, or more than one: "0123" becomes 123, "no" becomes False and "null" None.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import _loaders_dumpers, _typehints
from jsonargparse.typing import register_type

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_STR = "tag:yaml.org,2002:str"

_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")

# Whole numbers that YAML reads as they are written: without leading zeros and without colons.
_PLAIN_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$")


class Quoted(str):
    """A word in quotes that would be a number, a truth value or a list without the quotes."""

    __slots__ = ()


def install() -> None:
    """Change the loader of jsonargparse for this process; a second call changes nothing."""
    loader: Any = _loaders_dumpers.get_yaml_default_loader()
    is_installed = loader.yaml_constructors.get(_STR) is _construct_word
    if is_installed:
        return

    loader.add_constructor(_STR, _construct_word)
    loader.add_constructor(_FLOAT, _construct_float)
    _recognize_plain_ints_only(loader)

    register_type(Quoted, serializer=str, deserializer=Quoted)
    _typehints.sort_subtypes_for_union = partial(_words_first, _typehints.sort_subtypes_for_union)

    # `yaml.safe_dump` writes such a word with its quotes again.
    yaml.SafeDumper.add_representer(Quoted, yaml.SafeDumper.represent_str)


def _recognize_plain_ints_only(loader: Any) -> None:
    """Let a loader take `010` and `1:30` for words instead of whole numbers."""
    resolvers_of_character = {}
    for first_character, resolvers in loader.yaml_implicit_resolvers.items():
        resolvers_of_character[first_character] = [
            (tag, _PLAIN_INT if tag == _INT else pattern) for tag, pattern in resolvers
        ]
    loader.yaml_implicit_resolvers = resolvers_of_character


def _construct_word(loader: Any, node: Any) -> str:
    """Return the text of a node; `Quoted` if only its quotes make it a word."""
    text: str = loader.construct_scalar(node)
    is_in_quotes = node.style in ("'", '"')
    if not is_in_quotes:
        return text

    is_value_to_jsonargparse = _loaders_dumpers.load_basic(text) is not _loaders_dumpers.not_loaded
    is_value_to_yaml = loader.resolve(yaml.ScalarNode, text, (True, False)) != _STR
    is_collection = text.lstrip().startswith(("[", "{"))
    if is_value_to_jsonargparse or is_value_to_yaml or is_collection:
        return Quoted(text)
    return text


def _words_first(sort: Callable[..., Any], subtypes: Any, value: Any, *rest: Any) -> list[Any]:
    """Return the types of a union in the order in which a value is tried as each of them.

    A word in quotes is tried as a word first. Otherwise `None` would take "null", `int` would take
    "0123" and `bool` would take "no" before it is the turn of `str` or `Any`.

    Args:
        sort: The function of jsonargparse that gives its order.
        subtypes: The types of the union.
        value: The value that is parsed.
        rest: Further arguments of that function.
    """
    ordered = list(sort(subtypes, value, *rest))
    if not isinstance(value, Quoted):
        return ordered

    takes_words = [kind for kind in ordered if _takes_words(kind)]
    others = [kind for kind in ordered if not _takes_words(kind)]
    return takes_words + others


def _takes_words(kind: Any) -> bool:
    return kind is str or _typehints.accepts_any_value(kind)


def _construct_float(loader: Any, node: Any) -> Any:
    """Return a float; a number of base 60, such as 1:30.5, stays a word."""
    if ":" in node.value:
        return loader.construct_scalar(node)
    return loader.construct_yaml_float(node)


def misread(node: Any, above: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield the key, the text and the line of each number that YAML reads as another number.

    Args:
        node: A node of a file, as `yaml.compose` gives it.
        above: The key of the node, with a dot at its end; empty for the root.

    Yields:
        The whole key, the text as it is written, and its line, counted from 1.
    """
    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from misread(item, f"{above}{position}.")

    elif isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            yield from misread(value_node, f"{above}{key_node.value}.")

    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        # Without quotes (a style), YAML decides by the text what it is.
        is_base_60 = node.tag in (_INT, _FLOAT) and ":" in node.value
        if is_base_60 or _LEADING_ZERO.fullmatch(node.value):
            yield above.rstrip("."), node.value, node.start_mark.line + 1
