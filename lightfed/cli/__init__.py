"""The command line: `lightfed fit` and the others, and its one-line errors."""

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """`lightfed.cli.main`, as in version 0.1."""
    if name not in ("main", "USAGE_ERROR"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightfed.cli import command_line

    new = f"{__name__}.command_line.{name}"
    warnings.warn(f"{__name__}.{name} has moved to {new}", DeprecationWarning, stacklevel=2)
    return getattr(command_line, name)
