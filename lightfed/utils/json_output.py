"""What commands print with `--json`: one object on standard output, and nothing beside it."""

import json
import math
from collections.abc import Mapping
from typing import Any


def print_json(value: Mapping[str, Any]) -> None:
    """Print an object for a program; a number that is not finite is null."""
    print(json_text(value))


def json_text(value: Mapping[str, Any]) -> str:
    """Return an object for a program as text; a number that is not finite is null."""
    # Without allow_nan a number that `finite` has missed would be no JSON, and nobody would see it.
    return json.dumps(finite(value), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """Return a value with None in place of numbers that are not finite, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
