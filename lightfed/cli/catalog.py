"""Imports all classes that a configuration can name by their short name.

A class is found if its module is in one of the packages of `CATALOGUE`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, NamedTuple

from jsonargparse import _typehints

from lightfed.cli.commands import CATALOGUE

for _name in CATALOGUE:
    _package = import_module(_name)
    for _module in walk_packages(_package.__path__, f"{_package.__name__}."):
        import_module(_module.name)


def subclasses(base: type) -> set[type]:
    """Return all imported classes that derive from a class, at any depth."""
    derived: set[type] = set()
    children: list[type] = base.__subclasses__()
    for subclass in children:
        derived.add(subclass)
        derived |= subclasses(subclass)
    return derived


def without_namesakes(paths: list[str]) -> list[str]:
    """Return the paths of classes, without those of other packages that share a name with ours.

    A short name, such as MLP, then means lightfed's own class although torchvision has one, too.
    """
    own_names = {_class_name(path) for path in paths if _is_own(path)}
    return [path for path in paths if _is_own(path) or _class_name(path) not in own_names]


def _is_own(path: str) -> bool:
    return path.startswith("lightfed.")


def _class_name(path: str) -> str:
    return path.rpartition(".")[2]


class _Walk(NamedTuple):
    """What a walk over the subclasses of a type has found.

    Attributes:
        names: The names of all classes that derive from the type.
        paths: Those that a configuration can name, as jsonargparse lists them.
    """

    names: frozenset[str]
    paths: list[str]


# By the arguments of the walk. They stay as long as the process, because the commands of a list,
# and those of a comparison, ask for the same few types.
_walks: dict[Any, _Walk] = {}


@contextmanager
def walked_once() -> Iterator[None]:
    """Let jsonargparse (as of 4.53) walk the subclasses of a class once, until there are others.

    It walks them for every short name. With the classes of `transformers`, a walk takes a tenth of
    a second, and a configuration of three client groups asks for hundreds.
    """
    walk: Callable[..., list[str]] = _typehints.get_all_subclass_paths
    modules_at: dict[Any, int] = {}  # how many modules there were when this block last looked

    def walk_once(kind: Any, *more: Any, **options: Any) -> list[str]:
        key = (kind, more, tuple(options.items()))
        modules = len(sys.modules)
        if modules_at.get(key) == modules:
            return _walks[key].paths

        # There may be further classes: of a module that was imported in the meantime, or written
        # between two commands of a notebook. To look for them is a small part of listing all.
        names = _names_of_subclasses(kind)
        known = _walks.get(key)
        if known is None or known.names != names:
            _walks[key] = _Walk(names, without_namesakes(walk(kind, *more, **options)))
        modules_at[key] = modules
        return _walks[key].paths

    patched: Any = _typehints
    patched.get_all_subclass_paths = walk_once
    try:
        yield
    finally:
        patched.get_all_subclass_paths = walk


def _names_of_subclasses(kind: Any) -> frozenset[str]:
    """Return the full names of all imported classes that a value of a type can name."""
    classes: set[type] = set()
    for base in _typehints.get_class_types(kind):
        if isinstance(base, type):
            classes.add(base)
            classes |= subclasses(base)
    return frozenset(f"{one.__module__}.{one.__qualname__}" for one in classes)
