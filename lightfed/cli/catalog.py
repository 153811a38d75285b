"""Imports all classes that a configuration can name by their short name.

A class is found if its module is in one of the packages of `CATALOGUE`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

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


@contextmanager
def walked_once() -> Iterator[None]:
    """Let jsonargparse (as of 4.53) walk the subclasses of a class once in this block.

    It walks them for every short name. With the classes of `transformers`, a walk takes a tenth of
    a second, and a configuration of three client groups asks for hundreds.
    """
    walk = _typehints.get_all_subclass_paths
    known_paths: dict[Any, list[str]] = {}

    def walk_once(*args: Any, **options: Any) -> list[str]:
        # A module that is imported in the meantime can bring further classes.
        key = (args, tuple(options.items()), len(sys.modules))
        if key not in known_paths:
            known_paths[key] = without_namesakes(walk(*args, **options))
        return known_paths[key]

    _typehints.get_all_subclass_paths = walk_once
    try:
        yield
    finally:
        _typehints.get_all_subclass_paths = walk
