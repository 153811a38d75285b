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


def described(value: Any, key: str = "", lost: list[str] | None = None) -> Any:
    """A value as in a configuration file: objects by class_path, dataclasses by their fields.

    `lost` gets `key` and the reason where no configuration file can hold the value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): described(x, f"{key}.{name}", lost) for name, x in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [described(x, f"{key}.{place}", lost) for place, x in enumerate(value)]
    if isinstance(value, partial):
        inner = described(value.keywords, f"{key}.init_args", lost)
        if lost is not None and value.args:
            lost.append(f"{key}: partial has arguments without a name")
        return described(value.func, key, lost) | {"init_args": inner}
    if isclass(value) or isfunction(value):
        path = _path(value)
        if lost is not None and isfunction(value):
            lost.append(f"{key}: {path} is a function")
        elif lost is not None and ("<" in path or value.__module__ == "__main__"):
            lost.append(f"{key}: {path} is defined in a script or a function")
        return {"class_path": path}
    if isinstance(value, Recorded):
        kind = described(type(value), key, lost)
        return kind | {"init_args": arguments(value, f"{key}.init_args", lost)}
    if is_dataclass(value):
        return {
            field.name: described(getattr(value, field.name), f"{key}.{field.name}", lost)
            for field in fields(value)
        }
    if lost is not None and not isinstance(value, Path):
        lost.append(f"{key}: the arguments of {type(value).__name__} are not known")
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        return {"class_path": _path(type(value))}
    # without addresses, which no other run has
    return shorten(re.sub(" at 0x[0-9a-f]+", "", str(value)), 80)


def arguments(made: Recorded, key: str = "", lost: list[str] | None = None) -> dict[str, Any]:
    """The arguments of an object by name, with all defaults, as in a configuration file.

    `key` and `lost` as of `described`.
    """
    args, kwargs = made.given
    positional = zip(signature(type(made)).parameters, args, strict=False)
    kind: Any = type(made)
    given = _defaults(kind) | dict(positional) | kwargs
    return {name: described(value, f"{key}.{name}", lost) for name, value in given.items()}


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
