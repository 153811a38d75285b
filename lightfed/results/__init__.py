"""The files of runs as pandas tables, and metrics over several runs.

`read` a run folder, and group runs with `grouped` or `singles`. Names are imported on first use:
numpy, pandas and scipy take a while.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "groups": "Group grouped singles",
    "intervals": "Paired paired",
    "outcome": "Outcome outcome_of",
    "run": "Run read",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
