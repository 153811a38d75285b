"""Imports all classes that a configuration can name by their short name.

A class is found if its module is in one of these rooms.
"""

from importlib import import_module
from pkgutil import walk_packages

_ROOMS = (
    "algorithms",
    "data.datasets",
    "data.partition",
    "models.networks",
    "simulation",
    "topology",
)

for room in _ROOMS:
    package = import_module(f"lightfed.{room}")
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        import_module(module.name)
