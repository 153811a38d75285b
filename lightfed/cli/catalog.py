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

for name in CATALOGUE:
    package = import_module(name)
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        import_module(module.name)


def subclasses(base: type) -> set[type]:
    """All classes of the catalogue, and of what else is imported, that derive from a class."""
    found: set[type] = {*base.__subclasses__()}
    return found.union(*map(subclasses, found))


def without_namesakes(paths: list[str]) -> list[str]:
    """The paths of classes, without others of the name of one of lightfed's.

    A short name, such as MLP, then means lightfed's own also where torchvision has one.
    """
    ours = {path.rpartition(".")[2] for path in paths if path.startswith("lightfed.")}
    return [
        path
        for path in paths
        if path.startswith("lightfed.") or path.rpartition(".")[2] not in ours
    ]


@contextmanager
def walked_once() -> Iterator[None]:
    """Let jsonargparse (as of 4.53) walk the subclasses of a class once, not for every short name.

    With those of `transformers` a walk takes a tenth of a second, and a configuration of three
    client groups asks for hundreds. Modules that are imported meanwhile may have further classes.
    """
    walk, found = _typehints.get_all_subclass_paths, dict[Any, list[str]]()

    def once(*args: Any, **options: Any) -> list[str]:
        key = args, tuple(options.items()), len(sys.modules)
        if key not in found:
            found[key] = without_namesakes(walk(*args, **options))
        return found[key]

    _typehints.get_all_subclass_paths = once
    try:
        yield
    finally:
        _typehints.get_all_subclass_paths = walk
