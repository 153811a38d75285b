"""Objects that know their arguments, so that a run from a script has a configuration file too."""

import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from inspect import isclass, isfunction, signature
from pathlib import Path
from textwrap import shorten
from typing import Any

from jsonargparse import ArgumentParser

# A text longer than this is shortened in a configuration.
_LONGEST_TEXT = 80


class Recorded:
    """Records the arguments of its constructor.

    Attributes:
        given: The arguments by position, and those by name.
    """

    given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__new__(cls)
        # Not `instance.given = ...`: a frozen dataclass refuses that, and a module whose
        # constructor has not run yet fails.
        object.__setattr__(instance, "given", (args, kwargs))
        return instance


def described(value: Any) -> Any:
    """Return a value as a configuration file has it.

    Objects are given by their class_path and init_args, and dataclasses by their fields. An object
    that no configuration can make is given by its text.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): described(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [described(item) for item in value]

    if isinstance(value, partial):
        return described(value.func) | {"init_args": described(value.keywords)}
    if isclass(value) or isfunction(value):
        return {"class_path": dotted_path(value)}
    if isinstance(value, Recorded):
        return described(type(value)) | {"init_args": arguments(value)}
    if is_dataclass(value):
        return {field.name: described(getattr(value, field.name)) for field in fields(value)}

    kind = type(value)
    has_text = kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__
    if not has_text:
        return {"class_path": dotted_path(kind)}
    # Without addresses, which no other run has.
    return shorten(re.sub(" at 0x[0-9a-f]+", "", str(value)), _LONGEST_TEXT)


def arguments(instance: Recorded) -> dict[str, Any]:
    """Return the arguments of an object by name, with all defaults, as in a configuration file."""
    kind: Any = type(instance)
    args, kwargs = instance.given
    by_position = dict(zip(signature(kind).parameters, args, strict=False))
    values = {**_defaults(kind), **by_position, **kwargs}
    return {name: described(value) for name, value in values.items()}


@cache
def _defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the defaults of a class's arguments, those of its bases included."""
    parser = ArgumentParser()
    parser.add_class_arguments(kind, fail_untyped=False, sub_configs=True)
    return parser.get_defaults().as_dict()


def dotted_path(named: Any) -> str:
    """Return the path of a class or function; that of a script begins with the file's name."""
    module = named.__module__
    if module == "__main__":
        module = Path(getattr(sys.modules[module], "__file__", module)).stem
    return f"{module}.{named.__qualname__}"
