"""What a key accepts, and which name was probably meant."""

import re
from collections.abc import Collection
from contextlib import suppress
from difflib import get_close_matches
from inspect import isabstract, isclass
from textwrap import shorten
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser

SEE_HELP = "see --help"

# A hint that lists more names than this is of no help.
_MOST_NAMES = 30
_LONGEST_LIST = 180

# Types from these modules are values, not classes that a user names by `class_path`.
_MODULES_OF_VALUES = ("builtins", "collections.abc", "datetime", "pathlib", "torch")


def accepted(owner: Any) -> dict[str, Any]:
    """Return the arguments that a class or function accepts, with their annotations.

    They include those that it hands on by `**kwargs`. The annotation of an argument without one
    is None.
    """
    parser = ArgumentParser()
    if isclass(owner):
        names = parser.add_class_arguments(owner, fail_untyped=False)
    else:
        names = parser.add_function_arguments(owner, fail_untyped=False)

    annotation_of = annotations(owner)
    return {name: annotation_of.get(name) for name in names}


def annotations(owner: Any) -> dict[str, Any]:
    """Return the annotations of the arguments of a class or function, by name.

    Those of a class include the arguments of the classes that it derives from.
    """
    functions = [owner]
    if isclass(owner):
        # A derived class comes last, so that its annotations replace those of its bases.
        bases: list[Any] = list(reversed(owner.__mro__))
        functions = [base.__init__ for base in bases]

    annotation_of: dict[str, Any] = {}
    for function in functions:
        # An annotation can contain a name that is imported for type checkers only.
        with suppress(NameError, TypeError):
            annotation_of |= get_type_hints(function)
    return annotation_of


def base_of(annotation: Any) -> type | None:
    """Return the class whose subclasses a key names by `class_path`; None if it names none.

    Of several in one annotation, it is the last.
    """
    inner_types = get_args(annotation)
    if isclass(annotation) and not inner_types:
        return None if annotation.__module__ in _MODULES_OF_VALUES else annotation

    for inner in reversed(inner_types):
        base = base_of(inner)
        if base is not None:
            return base
    return None


def name_hint(name: str, names: Collection[str]) -> str:
    """Return which of the names was probably meant, or all of them if they are few."""
    nearest = get_close_matches(name, names, n=1)
    if nearest:
        return f"did you mean {nearest[0]}?"

    if 0 < len(names) <= _MOST_NAMES:
        known = f"known: {', '.join(sorted(set(names)))}"
        return shorten(known, _LONGEST_LIST, placeholder=" ...")
    return SEE_HELP


def class_hint(name: str, annotation: Any) -> str:
    """Return what to give at a key that accepts classes or values of a type.

    Args:
        name: The name that was given, or "" without one.
        annotation: The annotation of the argument; None if it is unknown.

    Returns:
        The class that was probably meant, or all classes if they are few, or else the annotation.
    """
    base = base_of(annotation)
    hint = name_hint(name.rpartition(".")[2], _short_names(base))
    if hint != SEE_HELP or annotation is None:
        return hint

    if base is not None and "Callable" in str(annotation):
        return f"name a {base.__name__} by class_path"

    if isabstract(annotation):
        # There are too many classes to list, and the type itself is none that can be given.
        return _some_classes(annotation)

    # The bare names of classes: `Algorithm` instead of `lightfed.api.algorithm.Algorithm`.
    annotation_text = re.sub(r"\b(?:[a-z]\w*\.)+(?=[A-Z])", "", plain_sentence(str(annotation)))
    hint = f"give {annotation_text}"
    if "Sequence[" in str(annotation):
        hint += ", as [one,other]"
    return hint


def _some_classes(base: type) -> str:
    """Return the first classes derived from an abstract class, and that a user can write one."""
    names = ", ".join(sorted(set(_short_names(base))))
    some = shorten(names, _LONGEST_LIST // 2, placeholder=" ...")
    return f"name one, such as {some}, or a class of your own derived from {base.__name__}"


def _short_names(base: type | None) -> list[str]:
    """Return the names of the classes derived from a class that are known without a module."""
    names: list[str] = []
    unvisited = [] if base is None else [base]
    while unvisited:
        # Called on `type`, because the method of a metaclass requires an argument.
        subclasses: list[type] = type.__subclasses__(unvisited.pop())
        unvisited += subclasses
        names += [kind.__name__ for kind in subclasses if _has_short_name(kind)]
    return names


def _has_short_name(kind: type) -> bool:
    """Return whether a configuration can name a class of these packages without its module."""
    if kind.__name__.startswith("_") or isabstract(kind):
        return False
    package = kind.__module__.partition(".")[0]
    return package in ("lightfed", "lightning", "torch")


def plain_sentence(text: str) -> str:
    """Return a message or an annotation on one line, with the bare names of types."""
    for noise in (r"\s*Subclass types expect one of:.*", r"Type \S.*? callable class: "):
        text = re.sub(noise, "", text, flags=re.DOTALL)
    text = re.sub(r"<class '(.*?)'>", r"\1", text)
    return " ".join(text.split())
