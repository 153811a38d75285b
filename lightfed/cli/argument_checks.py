"""Refuses values that have the right type, and of which nothing can be made."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from inspect import Parameter, signature
from math import isfinite
from pkgutil import resolve_name
from types import NoneType
from typing import Any, get_args

from jsonargparse import Namespace

from lightfed.cli.hints import annotations, base_of, class_hint
from lightfed.utils.errors import UserError

# A network without these arguments gets them from the data and its client group.
_GIVEN_BY_RUN = ("num_classes", "input_shape", "rate")


def check_arguments(arguments: Namespace | Mapping[str, Any], owner: Any, key: str) -> None:
    """Check the arguments of a class or function, and the values in them.

    Args:
        arguments: The arguments as parsed, by name.
        owner: The class or function.
        key: The key that the arguments are below.

    Raises:
        UserError: An argument has no value and requires one, a number is not finite, a class has
            no such argument, or is only the base of others. The error names the whole key.
    """
    annotation_of = annotations(owner)
    parameters = signature(owner).parameters
    values = vars(arguments) if isinstance(arguments, Namespace) else arguments

    for name, value in values.items():
        default = parameters[name].default if name in parameters else Parameter.empty
        # A default may be what a user may not give, such as an infinite number. Only floats are
        # compared by value: equality of other objects can be anything.
        if value is default or (isinstance(value, float) and value == default):
            continue

        is_checked = name in annotation_of and name not in _GIVEN_BY_RUN
        if value is None and is_checked and not _accepts_none(annotation_of[name]):
            fix = "give one, or leave the key out"
            raise UserError(f"{key}.{name}", found="no value", fix=fix)

        _check_value(value, annotation_of.get(name), f"{key}.{name}")


def _check_value(value: Any, annotation: Any, key: str) -> None:
    """Check a value at any depth; `annotation` is that of the argument that holds it."""
    if isinstance(value, float):
        if not isfinite(value):
            raise UserError(key, found=f"{value}", fix="give a finite number")

    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _check_value(item, annotation, f"{key}.{position}")

    elif isinstance(value, Mapping | Namespace):
        base = base_of(annotation)
        if "class_path" in value:
            _check_class(value, annotation, key)
        elif is_dataclass(base):
            check_arguments(value, base, key)


def _check_class(value: Any, annotation: Any, key: str) -> None:
    """Check a value that names a class by `class_path`, and its arguments."""
    try:
        owner = resolve_name(value["class_path"])
        parameters = signature(owner).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        # The word means something else to its reader, or the class is written in C.
        return

    takes_any_name = any(
        parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    for name in value.get("dict_kwargs") or {}:
        if name not in parameters and not takes_any_name:
            raise UserError(
                key=f"{key}.dict_kwargs.{name}",
                found=f"no such argument of {owner.__name__}",
                fix="leave it out",
            )

    # torch.nn.Module, or Lightning's Callback, can be made and does nothing.
    is_base = owner is base_of(annotation)
    if is_base and owner.__module__.startswith(("torch.", "lightning.")):
        found = f"{owner.__name__} alone does nothing"
        raise UserError(key, found, fix=class_hint("", annotation))

    check_arguments(value.get("init_args") or {}, owner, f"{key}.init_args")


def _accepts_none(annotation: Any) -> bool:
    if annotation in (Any, None, NoneType):
        return True
    return any(inner is NoneType or _accepts_none(inner) for inner in get_args(annotation))
