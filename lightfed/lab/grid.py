"""What a search tries: all combinations of lists of values, or draws from ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lightfed.lab.ranges import Range, Side, drawn

# The part of its training samples that a client keeps, by which a search chooses. A method's own
# `data.validation` comes before it.
VALIDATION_SHARE = 0.1

# How many trials are drawn from ranges, unless the user says so.
USUAL_TRIALS = 12

Point = tuple[str, ...]  # the words of a command that set the values of a trial


class Grid(NamedTuple):
    """The search that every method gets alike.

    Attributes:
        values: The values to try, by key: a list, or the range from which they are drawn.
        seeds: The seeds of the search. They are none of the compared ones.
        validation: The part of its training samples that a client keeps, in the search and in the
            compared runs. With 0 values are chosen on test samples.
        trials: How many points are drawn, if there is a range.
        draw_seed: The seed of these draws.
        stops_early: Whether hopeless trials are stopped before their end.
    """

    values: Mapping[str, Sequence[str] | Range]
    seeds: Sequence[int]
    validation: float = VALIDATION_SHARE
    trials: int = USUAL_TRIALS
    draw_seed: int = 0
    stops_early: bool = False

    @property
    def ranges(self) -> dict[str, Range]:
        """The ranges, by key."""
        return {key: axis for key, axis in self.values.items() if isinstance(axis, Range)}

    @property
    def points(self) -> list[Point]:
        """Every combination of lists, or what is drawn from ranges, as words of a command."""
        if self.ranges:
            return _words_of(drawn(self.values, self.trials, self.draw_seed))

        options = []
        for key, values in self.values.items():
            options.append([f"--{key}={value}" for value in values])
        return list(itertools.product(*options))

    def points_beyond(self, key: str, side: Side) -> list[Point]:
        """Return points whose value of a key lies beyond its range; the others are as before.

        They are half as many as those of the search. There are none if the range has an end on this
        side.
        """
        beyond = self.ranges[key].beyond(side)
        if beyond is None:
            return []
        axes = {**self.values, key: beyond}
        number = math.ceil(self.trials / 2)
        found = drawn(axes, number, self.draw_seed, f"search {side} the range of {key}")
        tried = self.points
        return [point for point in _words_of(found) if point not in tried]

    def on_edge(self, place: int) -> bool:
        """Whether the point at `place` has the first or the last value of one of the lists."""
        for values, word in zip(self.values.values(), self.points[place], strict=True):
            if isinstance(values, Range):
                continue
            value = word.partition("=")[2]
            if value in (values[0], values[-1]):
                return True
        return False


def _words_of(points: Iterable[Mapping[str, str]]) -> list[Point]:
    return [tuple(f"--{key}={value}" for key, value in point.items()) for point in points]


def values_of(point: Point) -> dict[str, str]:
    """Return the values of a point by their keys."""
    values = {}
    for word in point:
        key, _, value = word.removeprefix("--").partition("=")
        values[key] = value
    return values
