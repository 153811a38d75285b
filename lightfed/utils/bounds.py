"""The bounds of numbers that a user gives, by type.

An argument says its bounds by its annotation, such as `lr: Positive` or `epochs: Count | None`. The
classes of methods check all of their arguments by them, before their constructors run: what a
constructor gets lies within its bounds. Within a list or a tuple every number is checked.
"""

from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from math import inf
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from lightfed.utils.errors import UserError


class Bound(NamedTuple):
    """An interval of numbers.

    Attributes:
        low, high: Its ends, which belong to it if it is closed there.
        ends: Which ends belong to it, as in mathematics: "[]", "(]", "[)" or "()".
        fix: What to give instead of a number outside.
    """

    low: float
    high: float
    ends: str
    fix: str

    def holds(self, value: float) -> bool:
        """Whether a number lies in the interval; NaN does not."""
        above = value >= self.low if self.ends[0] == "[" else value > self.low
        below = value <= self.high if self.ends[1] == "]" else value < self.high
        return above and below


# Rates, temperatures and weights of which none makes no sense.
Positive = Annotated[float, Bound(0, inf, "()", "give a number above 0")]
# Weights of terms, and relative rates, which 0 switches off.
Weight = Annotated[float, Bound(0, inf, "[)", "give a number of 0 or more")]
# A share of what there is: not nothing, perhaps all.
Share = Annotated[float, Bound(0, 1, "(]", "give a share above 0 and at most 1")]
# A share that may also be nothing.
Part = Annotated[float, Bound(0, 1, "[]", "give a share from 0 to 1")]
# A share of which neither nothing nor all makes sense.
Fraction = Annotated[float, Bound(0, 1, "()", "give a share between 0 and 1, such as 0.05")]
# Momentum: 1 would never forget.
Momentum = Annotated[float, Bound(0, 1, "[)", "give a number from 0 to below 1")]
# Of things of which there is at least one.
Count = Annotated[int, Bound(1, inf, "[)", "give at least 1")]
# Of things of which there may be none.
Number = Annotated[int, Bound(0, inf, "[)", "give 0 or more")]


def check_arguments(
    owner: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: str
) -> None:
    """Reject arguments of a class outside of their bounds.

    Arguments that a constructor hands on to that of a base are checked by the base's annotation.

    Args:
        owner: The class.
        args: Its arguments by place.
        kwargs: Its arguments by name.
        key: Of its arguments in a configuration.

    Raises:
        UserError: Names the argument.
    """
    given = dict(zip(_places(owner), args, strict=False)) | dict(kwargs)
    bounds = annotated(owner)
    for name, value in given.items():
        for bound, number in _bounded(bounds.get(name), value):
            if not bound.holds(number):
                raise UserError(f"{key}.{name}", f"{number}", bound.fix)


def annotated(owner: type) -> dict[str, Any]:
    """The annotations of all arguments of a class, by name, with their bounds."""
    found: dict[str, Any] = {}
    for kind in reversed(owner.__mro__):
        constructor = vars(kind).get("__init__")
        found |= getattr(constructor, "__annotations__", {})
    return found


def _places(owner: type) -> list[str]:
    """The names of a class's arguments that may be given by place, in order."""
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    every = signature(owner).parameters.values()
    return [parameter.name for parameter in every if parameter.kind in by_place]


def _bounded(annotation: Any, value: Any) -> Iterator[tuple[Bound, float]]:
    """The numbers of a value, each with its bound."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _bounded(annotation, item)
    elif isinstance(value, int | float):
        bound = bound_of(annotation)
        if bound is not None:
            yield bound, value


def bound_of(annotation: Any) -> Bound | None:
    """The bound of numbers of a type, also within a list or beside None; None without any."""
    if get_origin(annotation) is Annotated:
        bounds = (part for part in get_args(annotation)[1:] if isinstance(part, Bound))
        return next(bounds, None)
    inner = (bound_of(part) for part in get_args(annotation))
    return next((bound for bound in inner if bound is not None), None)
