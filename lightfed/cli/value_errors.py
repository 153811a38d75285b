"""Turns jsonargparse's message about one value into one line with the whole key.

jsonargparse (as of 4.53) nests its messages: a key, the class that is named there, a key below it,
and so on, with all alternatives of a type that do not apply either. What a user needs is the
innermost message and the keys on the way to it.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pkgutil import resolve_name
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser

from lightfed.cli.hints import accepted, base_of, class_hint, name_hint, plain_sentence
from lightfed.cli.named_files import list_in_files
from lightfed.utils.errors import UserError

# A message about the value of a key.
OF_KEY = re.compile(r'Parser key "(?P<key>[^"]+)"(?: element \d+)?:\s*(?P<message>.*)', re.DOTALL)

# A message about an argument without a value.
REQUIRED = re.compile(r"the following arguments are required: (?P<key>[\w.]+)")

# Messages that contain others: `rest` is the inner message, `path` the class that it is about.
_OUTER_MESSAGES = (
    # The value could also have been the path of a file.
    r"- Expected a path but .*? invalid\n\s*- (?P<rest>.*)",
    # A class that cannot be made.
    r"Problem with given class_path '(?P<path>.+?)':\s*(?P<rest>.*)",
    # A class that is to be made later.
    r"Type .*? expects a function or a callable class: (?P<rest>.*)"
    r"\. Got value: Namespace\(class_path='(?P<path>[\w.]+)'",
    # A type with alternatives: the first one that says more than that the type is another.
    r"Does not validate .*?\n *Errors:\n(?P<margin> *)- (?:.*?\n(?P=margin)- )??"
    r"(?P<rest>(?:Problem with|Type |Expected a dot ).*?)"
    r"(?=\n(?P=margin)- |\n *Given [^\n]*\n[^\n]*\Z)",
)

# Why a file of the user cannot be imported.
_IMPORT_FAILURE = re.compile(
    r"No module named '.+?'|module '.+?' has no attribute '\w+'|cannot import name '.+?' from '.+?'"
    r"|(?<=Errors:\n    - )(?!Expected |Problem |Type |Does |Not )[^\n]+"
)


def value_error(key: str, message: str, annotation: Any) -> UserError:
    """Return the error for a message about a value.

    Args:
        key: The whole key of the value.
        message: The message of jsonargparse, without that key.
        annotation: The annotation of the argument; None if it is unknown.

    Returns:
        The innermost message, with the key that it is about.
    """
    text, class_path = _innermost(message)
    owner, arguments = _class_and_arguments(class_path)
    base = base_of(annotation)

    # The arguments of a client group stand directly below its key.
    has_init_args = not (is_dataclass(owner) and owner is base)
    above = f"{key}.init_args" if has_init_args else key

    of_key = OF_KEY.match(text)
    if of_key is not None:
        name = of_key["key"]
        return value_error(f"{above}.{name}", of_key["message"], arguments.get(name))

    unknown = re.match(r"Option '(.+?)' is not accepted", text)
    if unknown is not None:
        name = unknown[1]
        if owner is base and has_init_args:
            # The keys of a class that nobody has named.
            return UserError(key, found="no class_path", fix=class_hint("", annotation))
        return UserError(
            key=f"{above}.{name}",
            found=f"no such argument of {class_path}",
            fix=name_hint(name, arguments),
        )

    required = REQUIRED.match(text)
    if required is not None:
        name = required["key"]
        fix = class_hint("", arguments.get(name))
        return UserError(f"{above}.{name}", plain_sentence(text), fix)

    return (
        _import_error_within(key, text, class_path)
        or _ambiguous_name(key, text)
        or _unfinished_class(key, text)
        or _wrong_value(key, text, annotation, class_path if owner is None else "")
    )


def _innermost(message: str) -> tuple[str, str]:
    """Return the innermost message, and the path of the innermost class around it, or ""."""
    class_path = ""
    while True:
        outer = _first_match(message)
        if outer is None:
            return message, class_path
        message = outer["rest"].strip()
        class_path = outer.groupdict().get("path") or class_path


def _first_match(message: str) -> re.Match[str] | None:
    for pattern in _OUTER_MESSAGES:
        match = re.match(pattern, message, re.DOTALL)
        if match is not None:
            return match
    return None


def _class_and_arguments(class_path: str) -> tuple[Any, dict[str, Any]]:
    """Return the class at a path and what it accepts; None and nothing if it has no such class."""
    try:
        owner = resolve_name(class_path)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None, {}

    try:
        return owner, accepted(owner)
    except (ImportError, AttributeError, TypeError, ValueError):
        return owner, {}


def _import_error_within(key: str, text: str, class_path: str) -> UserError | None:
    """Return the error about a file that exists and imports something that does not."""
    missing = re.match(r"No module named '(.+?)'", text)
    if missing is None or not class_path or class_path.startswith(missing[1]):
        return None
    found = f"{class_path}: {plain_sentence(text)}"
    return UserError(key, found, fix="correct the imports of its file")


def _ambiguous_name(key: str, text: str) -> UserError | None:
    """Return the error about a short name that several classes have."""
    several = re.match(r"Multiple subclasses with name (\w+).*?: (.*?)\.?$", text)
    if several is None:
        return None
    name, paths = several.groups()
    choice = " or ".join(paths.split(", "))
    return UserError(key, found=f"{name} is {choice}", fix="give the whole name")


def _unfinished_class(key: str, text: str) -> UserError | None:
    """Return the error about a user's class that lacks methods."""
    abstract = re.match(r"Expected an instantiatable class, but (\S+) is abstract", text)
    if abstract is None:
        return None

    class_path = abstract[1]
    # A bare name, such as `Algorithm`, is of one of lightfed's classes.
    if "." not in class_path or class_path.startswith("lightfed."):
        # The user wanted a class that is derived from this abstract one.
        return None

    missing = sorted(getattr(resolve_name(class_path), "__abstractmethods__", ()))
    if not missing:
        return None
    found = f"{class_path} lacks {', '.join(missing)}"
    return UserError(key, found, fix="define it in the class")


def _wrong_value(key: str, text: str, annotation: Any, unknown_class: str) -> UserError:
    """Return the error about any other value.

    Args:
        key: The whole key of the value.
        text: The innermost message.
        annotation: The annotation of the argument.
        unknown_class: The name of a class that cannot be imported, or "".
    """
    named = re.search(r"(?:import path string:|class, but) ([\w.]+)", text)
    hint = class_hint(named[1] if named else unknown_class, annotation)

    value = re.match(".*(?:Got|Given) value: (.*)", text, re.DOTALL)
    if value is None:
        return UserError(key, plain_sentence(text) or "''", hint)

    failure = _IMPORT_FAILURE.search(text)
    if failure is not None and not hint.startswith("did you"):
        found = plain_sentence(f"{failure[0]}, from {value[1]}")
        return UserError(key, found, fix="correct the name or file")

    return UserError(key, plain_sentence(value[1]) or "''", hint)


def item_at_fault(key: str, annotation: Any, argv: Sequence[str]) -> str:
    """Return which item of a list the parser refuses.

    The message of the parser does not say it, so the items are parsed again, one by one.

    Args:
        key: The whole key of the list.
        annotation: The annotation of the argument.
        argv: The words of the command, which give the list or name the files that have it.

    Returns:
        The position as the end of a key, such as ".1"; "" if it is not a list or no item is wrong.
    """
    values = [word.partition("=")[2] for word in argv if word.startswith(f"--{key}=")]

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--items", type=annotation)

    # A list can be endless by an alias, hold what no type admits, or not be YAML.
    with suppress(RecursionError, TypeError, yaml.YAMLError):
        # The last word of several counts, and a word counts more than a file.
        items = yaml.safe_load(values[-1]) if values else list_in_files(argv, key)
        if not isinstance(items, list):
            return ""

        for position, item in enumerate(items):
            try:
                parser.parse_object({"items": [item]})
            except ArgumentError:
                return f".{position}"
    return ""
