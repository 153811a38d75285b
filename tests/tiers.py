"""Which cases of a sweep the default tier has; the others run with `pytest -m matrix`."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def by_default(names: Iterable[str], *default: str) -> list[Any]:
    """All names as parameters of a test, those not in `default` marked for the matrix."""
    names = list(names)
    unknown = set(default) - set(names)
    assert not unknown, f"no such cases: {unknown}"
    return [
        pytest.param(name, marks=() if name in default else pytest.mark.matrix) for name in names
    ]


def first_of_each(
    cases: Iterable[T], kind: Callable[[T], Any], name: Callable[[T], str]
) -> list[Any]:
    """All cases as parameters of a test, named; marked for the matrix but for one of each kind."""
    seen: set[Any] = set()
    found = []
    for case in cases:
        marks = pytest.mark.matrix if kind(case) in seen else ()
        seen.add(kind(case))
        found.append(pytest.param(case, marks=marks, id=name(case)))
    return found
