"""Every number that a method takes has bounds, and what lies outside of them is refused by name."""

import math
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from torch import nn

import lightfed.aggregation.server_optimizers as server_optimizers
import lightfed.algorithms
import lightfed.local.penalties
from lightfed import Algorithm
from lightfed.local.hooks import LocalPenalty
from lightfed.utils.bounds import Bound, annotated, bound_of, words_of
from lightfed.utils.errors import UserError

for found in pkgutil.walk_packages(lightfed.algorithms.__path__, "lightfed.algorithms."):
    import_module(found.name)

# Any whole number of units is a step of FedRolex; a negative one is forwards.
ANY = {("FedRolex", "step")}
# A matrix has a check of its own, of its sums.
OTHERWISE = {"mixing"}


def below(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from below(child)


def ours(base: type) -> list[type]:
    """The classes of the package that a user may name."""
    found = {c for c in below(base) if c.__module__.startswith("lightfed.")}
    return sorted((c for c in found if not isabstract(c)), key=lambda c: c.__name__)


METHODS = [*ours(Algorithm), *ours(LocalPenalty)]
METHODS += [kind for kind in ours(server_optimizers._Adaptive) if kind.__name__[0] != "_"]


def is_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(is_number, get_args(annotation)))


def numbers(kind: type) -> dict[str, Any]:
    """The annotations of a class's numbers, by name."""
    named = {name: a for name, a in annotated(kind).items() if name not in {"return", *OTHERWISE}}
    return {n: a for n, a in named.items() if is_number(a) and (kind.__name__, n) not in ANY}


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_every_number_of_a_method_has_bounds(kind: type) -> None:
    without = [name for name, annotation in numbers(kind).items() if bound_of(annotation) is None]
    assert without == [], f"{kind.__name__}: annotate them with a type of lightfed.utils.bounds"


def outside(bound: Bound) -> list[float]:
    """Numbers that lie just outside of an interval, and NaN."""
    low = [bound.low - 1] if bound.ends[0] == "[" else [bound.low, bound.low - 1]
    high = [bound.high + 1] if bound.ends[1] == "]" else [bound.high]
    return [*low, *high, math.nan]


EVERY = [(kind, name) for kind in METHODS for name in numbers(kind)]


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=lambda x: getattr(x, "__name__", x))
def test_a_number_out_of_its_bounds_is_refused_by_name(kind: type, name: str) -> None:
    bound = bound_of(numbers(kind)[name])
    assert bound is not None
    needed: dict[str, Any] = {"shared": nn.Linear, "head": "net.2", "global_layers": 1, "q": 1.0}
    needed |= {"mu": 1.0, "lipschitz": 1.0, "params": [nn.Parameter()]}
    others = {key: value for key, value in needed.items() if key in annotated(kind)}
    for value in outside(bound):
        for given in (value, [value, value]):
            with pytest.raises(UserError) as refused:
                kind(**others | {name: given})
            assert refused.value.key.endswith(f".init_args.{name}")
            assert refused.value.found == f"{value}"
            assert refused.value.fix == bound.fix


def test_an_argument_by_place_is_checked_too() -> None:
    with pytest.raises(UserError, match=r"model\.algorithm\.init_args\.mu: -1; give a number"):
        lightfed.algorithms.fedprox.FedProx(-1)


def test_a_method_of_a_user_gets_the_checks_by_its_annotations() -> None:
    from lightfed.algorithms.fedavg import FedAvg
    from lightfed.utils.bounds import Count

    class Own(FedAvg):
        def __init__(self, echoes: Count = 1, **fedavg: Any) -> None:
            super().__init__(**fedavg)
            self.echoes = echoes

    assert Own(2).echoes == 2
    with pytest.raises(UserError, match="echoes: 0; give at least 1"):
        Own(echoes=0)


WORDS = [
    (kind, name)
    for kind in METHODS
    for name, annotation in annotated(kind).items()
    if name != "return" and words_of(annotation)
]


def test_there_are_methods_with_words() -> None:
    assert ("FlexiFed", "initial") in {(kind.__mro__[1].__name__, name) for kind, name in WORDS}


@pytest.mark.parametrize(("kind", "name"), WORDS)
def test_an_unknown_word_is_refused_by_name(kind: Any, name: str) -> None:
    with pytest.raises(UserError, match=rf"{name}: 'nonsense'") as stated:
        kind(**{name: "nonsense"})
    assert "give one of: " in str(stated.value)


def test_words_beside_other_types() -> None:
    assert words_of(Literal["a", "b"] | None) == ["a", "b"]
    assert words_of(Literal["auto"] | int) == ["auto"]
    assert words_of(Literal["auto"] | str) == []
    assert words_of(Literal["auto"] | Path) == []
    assert words_of(str) == []
    assert words_of(Literal[1, 2]) == []
