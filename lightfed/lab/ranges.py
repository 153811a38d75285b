"""Ranges of `--tune`, such as `log(0.01, 1)`, and the points that are drawn from them.

The points are those of a Sobol sequence. They fill a range evenly whatever their number is, and
with more trials the first ones stay the same, so that their runs are found again. All methods get
the same points. The sequence is shifted by a number that a seed names, so that another seed gives
other points (R. Cranley and T. Patterson, "Randomization of number theoretic methods for multiple
integration", SIAM Journal on Numerical Analysis 13, 1976).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from lightfed.utils.errors import UserError

Kind = Literal["log", "uniform", "int"]
Side = Literal["below", "above"]

# Values have so many digits that two of a range differ: their runs are known by them.
_DIGITS = 3

_CALL = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")


class Range(NamedTuple):
    """The values between two numbers.

    Attributes:
        kind: How they are drawn: `log` evenly in the logarithm, `uniform` evenly, `int` evenly
            among whole numbers, with both ends.
        low: The smallest value.
        high: The largest value.
    """

    kind: Kind
    low: float
    high: float

    @property
    def words(self) -> str:
        """The range as it is written."""
        return f"{self.kind}({self.low:.12g}, {self.high:.12g})"

    def at(self, position: float) -> str:
        """Return the value at a position in 0..1, 1 excluded, as a word of a command."""
        if self.kind == "int":
            count = self.high - self.low + 1
            return f"{int(self.low) + math.floor(position * count)}"

        if self.kind == "uniform":
            width = self.high - self.low
            decimals = _DIGITS - 1 - math.floor(math.log10(width))
            value = round(self.low + position * width, decimals)
            digits = 12
        else:
            decades = math.log10(self.high / self.low)
            value = self.low * (self.high / self.low) ** position
            digits = _DIGITS + max(0, math.ceil(-math.log10(decades)))

        # Rounding must not lead out of the range.
        text = f"{value:.{digits}g}"
        inside = min(max(float(text), self.low), self.high)
        return text if inside == float(text) else f"{inside:.12g}"

    def beyond(self, side: Side) -> Range | None:
        """Return the range next to this one on a side, which is as long; None if there is none.

        That of `log` has the same factor between its ends. Others have the same width. A range of
        numbers that are not negative is not extended to negative ones, and one of positive whole
        numbers not to 0: rates, shares and counts do not have them.
        """
        if self.kind == "log":
            factor = self.high / self.low
            if side == "above":
                return Range("log", self.high, self.high * factor)
            return Range("log", self.low / factor, self.low)

        step = 1 if self.kind == "int" else 0
        width = self.high - self.low + step
        if side == "above":
            return Range(self.kind, self.high + step, self.high + width)

        least = -math.inf
        if self.low >= 0:
            least = min(self.low, step)
        low = max(self.low - width, least)
        high = self.low - step
        is_empty = low > high if self.kind == "int" else low >= high
        return None if is_empty else Range(self.kind, low, high)


def range_of(written: str, word: str, key: str = "--tune") -> Range | None:
    """Return the range that a text is; None if it is a list of values.

    Args:
        written: The text, such as `log(0.01, 1)` or `0.1,0.3`.
        word: What the user has written, for an error.
        key: Where it was written, for an error.

    Raises:
        UserError: It looks like a range, and is none.
    """
    call = _CALL.fullmatch(written)
    if call is None:
        if re.search(r"\b(log|uniform|int)\s*\(", written):
            raise UserError(key, word, "give one range, or two or more values")
        return None

    kind, inner = call.groups()
    if kind not in get_args(Kind):
        raise UserError(key, word, "give log(a, b), uniform(a, b) or int(a, b), or a list")

    try:
        low, high = (float(number) for number in inner.split(","))
    except ValueError:
        raise UserError(key, word, f"give two numbers: {kind}(0.01, 1)") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(key, word, "give two finite numbers, the smaller one first")
    if kind == "log" and low <= 0:
        raise UserError(key, word, "give positive numbers, or uniform(a, b)")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise UserError(key, word, "give whole numbers, or uniform(a, b)")
    return Range(kind, low, high)  # type: ignore[arg-type]


def drawn(
    axes: Mapping[str, Range | Sequence[str]], number: int, seed: int, purpose: str = "search"
) -> list[dict[str, str]]:
    """Return points whose values are drawn from ranges and lists.

    Args:
        axes: For each key, its range or the list of its values.
        number: The number of points. Equal ones are there once, so there can be fewer.
        seed: The seed of the draws.
        purpose: What they are drawn for; another purpose has other draws.

    Returns:
        The values of each point by key, in the order of `axes`.
    """
    # Not before: its import takes a second that most commands do not need.
    from scipy.stats import qmc

    keys = sorted(axes)
    exponent = max(1, math.ceil(math.log2(number)))
    positions = qmc.Sobol(d=len(keys), scramble=False).random_base2(exponent)[:number]

    points = []
    for row in positions:
        value_of = {}
        for key, position in zip(keys, row, strict=True):
            shifted = (float(position) + _shift(seed, purpose, key)) % 1.0
            value_of[key] = _value(axes[key], shifted)
        points.append(tuple(value_of[key] for key in axes))
    return [dict(zip(axes, point, strict=True)) for point in dict.fromkeys(points)]


def _value(axis: Range | Sequence[str], position: float) -> str:
    """Return the value of a range or of a list at a position in 0..1."""
    if isinstance(axis, Range):
        return axis.at(position)
    return axis[math.floor(position * len(axis))]


def _shift(seed: int, purpose: str, key: str) -> float:
    """Return a number in 0..1 that is a pure function of its name."""
    name = f"{seed}/{purpose}/{key}".encode()
    digest = hashlib.blake2b(name, digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32
