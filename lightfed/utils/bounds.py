"""The bounds of numbers that a user gives, by type, and the words that an argument takes.

An argument says its bounds by its annotation, such as `lr: Positive` or `epochs: Count | None`, and
its words as `Literal["own", "group"]`. The classes of methods check all of their arguments by them,
before their constructors run: what a constructor gets lies within its bounds. Within a list or a
tuple every number is checked. A parser checks the words of a configuration; in Python only this
does.
"""

from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from math import inf
from os import PathLike
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from lightfed.utils.errors import UserError


class Bound(NamedTuple):
    """An interval of numbers.

    Attributes:
        low: Its lower end, which belongs to it if it is closed there.
        high: Its upper end, likewise.
        ends: Which ends belong to it, as in mathematics: "[]", "(]", "[)" or "()".
        fix: What to give instead of a number outside.
    """

    low: float
    high: float
    ends: str
    fix: str

    def holds(self, value: float) -> bool:
        """Return whether a number lies in the interval; NaN does not."""
        above = value >= self.low if self.ends[0] == "[" else value > self.low
        below = value <= self.high if self.ends[1] == "]" else value < self.high
        return above and below


# Rates, temperatures and weights that make no sense as 0.
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
# A number of things of which there is at least one.
Count = Annotated[int, Bound(1, inf, "[)", "give at least 1")]
# A number of things of which there may be none.
Number = Annotated[int, Bound(0, inf, "[)", "give 0 or more")]


def check_arguments(
    owner: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: str
) -> None:
    """Refuse arguments of a class outside of their bounds, and unknown words.

    Arguments that a constructor hands on to that of a base are checked by the base's annotation.

    Args:
        owner: The class.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        key: The key of its arguments in a configuration.

    Raises:
        UserError: It names the argument.
    """
    arguments = dict(zip(_positional_names(owner), args, strict=False)) | dict(kwargs)
    annotations = annotated(owner)
    for name, value in arguments.items():
        words = words_of(annotations.get(name))
        if isinstance(value, str) and words and value not in words:
            raise UserError(
                key=f"{key}.{name}", found=repr(value), fix=f"give one of: {', '.join(words)}"
            )
        for bound, number in _bounded_numbers(annotations.get(name), value):
            if not bound.holds(number):
                raise UserError(key=f"{key}.{name}", found=f"{number}", fix=bound.fix)


def words_of(annotation: Any) -> list[str]:
    """Return the words that a type takes; none if it takes any word, or no words at all."""
    if get_origin(annotation) is Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    if get_origin(annotation) not in (Union, UnionType):
        return []

    words: list[str] = []
    for member in get_args(annotation):
        takes_other_words = isinstance(member, type) and issubclass(member, str | PathLike)
        if takes_other_words:
            return []
        words += words_of(member)
    return words


def annotated(owner: type) -> dict[str, Any]:
    """Return the annotations of all arguments of a class, by name, with their bounds."""
    annotations: dict[str, Any] = {}
    for kind in reversed(owner.__mro__):
        constructor = vars(kind).get("__init__")
        annotations |= getattr(constructor, "__annotations__", {})
    return annotations


def _positional_names(owner: type) -> list[str]:
    """Return the names of a class's arguments that may be given by position, in order."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature(owner).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _bounded_numbers(annotation: Any, value: Any) -> Iterator[tuple[Bound, float]]:
    """Yield the numbers of a value, each with its bound; none without a bound."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _bounded_numbers(annotation, item)
    elif isinstance(value, int | float):
        bound = bound_of(annotation)
        if bound is not None:
            yield bound, value


def bound_of(annotation: Any) -> Bound | None:
    """Return the bound of numbers of a type, also within a list or beside None.

    None without any.
    """
    if get_origin(annotation) is Annotated:
        metadata = get_args(annotation)[1:]
        return next((item for item in metadata if isinstance(item, Bound)), None)

    for inner in get_args(annotation):
        bound = bound_of(inner)
        if bound is not None:
            return bound
    return None
