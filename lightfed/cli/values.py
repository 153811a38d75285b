"""Values that the parser lets through although nothing can be made of them."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from inspect import Parameter, signature
from math import isfinite
from pkgutil import resolve_name
from types import NoneType
from typing import Any, get_args

from jsonargparse import Namespace

from lightfed.cli.errors import annotations, base_of, class_hint
from lightfed.utils.errors import require

_LINKED = ("num_classes", "input_shape", "rate")  # of the run, if a network does not give them


def check_arguments(given: Any, owner: Any, key: str) -> None:
    """Reject values of the arguments of a class or function, `given` below a key, and in them.

    No value where one is needed, numbers that are not finite or too large for any use, a class that
    is only a base of others. A UserError names the whole key.
    """
    wanted, known = annotations(owner), signature(owner).parameters
    for name, value in vars(given).items() if isinstance(given, Namespace) else given.items():
        if name in known and value is known[name].default:
            continue
        if value is None and name in wanted and name not in _LINKED:
            fix = "give one, or leave the key out"
            require(_takes_none(wanted[name]), f"{key}.{name}", "no value", fix)
        _check(value, wanted.get(name), f"{key}.{name}")


def _check(value: Any, wanted: Any, key: str) -> None:
    if isinstance(value, float):
        require(isfinite(value), key, value, "give a finite number")
    elif isinstance(value, int):
        require(abs(value) < 2**63, key, value, "give a number of at most 18 digits")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _check(item, wanted, f"{key}.{position}")
    elif isinstance(value, Mapping | Namespace):
        base = base_of(wanted)
        if "class_path" in value:
            _check_class(value, resolve_name(value["class_path"]), wanted, key)
        elif is_dataclass(base):
            check_arguments(value, base, key)


def _check_class(given: Any, owner: Any, wanted: Any, key: str) -> None:
    plain = owner is base_of(wanted) and not owner.__module__.startswith("lightfed.")
    require(not plain, key, f"{owner.__name__} alone does nothing", class_hint("", wanted))
    kinds = [parameter.kind for parameter in signature(owner).parameters.values()]
    free = given.get("dict_kwargs") is None or Parameter.VAR_KEYWORD in kinds
    fix = "write arguments below init_args"
    require(free, f"{key}.dict_kwargs", f"{owner.__name__} takes no others", fix)
    check_arguments(given.get("init_args") or {}, owner, f"{key}.init_args")


def _takes_none(wanted: Any) -> bool:
    inner = get_args(wanted)
    return wanted in (Any, None, NoneType) or any(a is NoneType or _takes_none(a) for a in inner)
