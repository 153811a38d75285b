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


class Recorded:
    """Records the arguments of its constructor by place and by name."""

    given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        object.__setattr__(made, "given", (args, kwargs))  # frozen, or not yet a module
        return made


def described(value: Any) -> Any:
    """A value as in a configuration file: objects by class_path, dataclasses by their fields."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): described(x) for name, x in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [described(x) for x in value]
    if isinstance(value, partial):
        return described(value.func) | {"init_args": described(value.keywords)}
    if isclass(value) or isfunction(value):
        return {"class_path": _path(value)}
    if isinstance(value, Recorded):
        return described(type(value)) | {"init_args": arguments(value)}
    if is_dataclass(value):
        return {field.name: described(getattr(value, field.name)) for field in fields(value)}
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        return {"class_path": _path(type(value))}
    # without addresses, which no other run has
    return shorten(re.sub(" at 0x[0-9a-f]+", "", str(value)), 80)


def arguments(made: Recorded) -> dict[str, Any]:
    """The arguments of an object by name, with all defaults, as in a configuration file."""
    args, kwargs = made.given
    positional = zip(signature(type(made)).parameters, args, strict=False)
    kind: Any = type(made)
    given = _defaults(kind) | dict(positional) | kwargs
    return {name: described(value) for name, value in given.items()}


@cache
def _defaults(made: type[Any]) -> dict[str, Any]:
    """Defaults of a class's arguments, those of its bases included."""
    parser = ArgumentParser()
    parser.add_class_arguments(made, fail_untyped=False, sub_configs=True)
    return parser.get_defaults().as_dict()


def _path(named: Any) -> str:
    """The dotted path of a class or function; that of a script begins with the file's name."""
    module = named.__module__
    if module == "__main__":
        module = Path(getattr(sys.modules[module], "__file__", module)).stem
    return f"{module}.{named.__qualname__}"
