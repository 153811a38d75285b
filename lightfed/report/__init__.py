"""Reports on runs: a self-contained page, figures, tables in the terminal, comparisons.

They need only the files of a run folder, so they work on a copy of it. Names are imported on first
use: pandas takes half a second.
"""

from importlib import import_module
from typing import Any

_HOMES = {"build": "page", "print_summary": "page", "compare": "comparison"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
