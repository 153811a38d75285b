"""The options of a search, for `compare` and `sweep`, and what a study says of it."""

import argparse
import re
from collections.abc import Callable, Sequence

from lightfed.lab.grid import USUAL_TRIALS, VALIDATION_SHARE, Grid
from lightfed.lab.ranges import Range, range_of
from lightfed.lab.sweep import PositiveInt
from lightfed.utils.errors import UserError

# Options that only a search has, by name.
OPTIONS_OF_A_SEARCH = ("tune_seed", "trials", "trials_seed", "stop_early")


def add_search(add: Callable[..., object]) -> None:
    """Add the options of a search.

    Args:
        add: The `add_argument` of a parser, or of a group in it.
    """
    alike = (
        "search these values for all methods alike, such as model.optimizer.lr=.01,.03,.1 or "
        "'model.optimizer.lr=log(0.01, 1)'; ranges are log(a, b), uniform(a, b) and int(a, b)"
    )
    add("--tune", action="extend", nargs="+", default=[], metavar="KEY=X,Y", help=alike)
    of_search = "seed of the search, or several, such as 100-102 (default: 100)"
    add("--tune-seed", type=seed_list, metavar="SEEDS", help=of_search)
    number = f"trials that are drawn from ranges (default: {USUAL_TRIALS})"
    add("--trials", type=PositiveInt, metavar="N", help=number)
    of_draws = "seed by which they are drawn (default: 0)"
    add("--trials-seed", type=_seed, metavar="N", help=of_draws)
    halving = (
        "stop the worse half of the trials after a quarter and after a half of their rounds "
        "(default: for trials that are drawn)"
    )
    add("--stop-early", action=argparse.BooleanOptionalAction, default=None, help=halving)


def grid_of_options(asked: argparse.Namespace) -> Grid | None:
    """Return the search that the options of `add_search` ask for; None for no search.

    Raises:
        UserError: The options do not fit each other.
    """
    if not asked.tune:
        for name in OPTIONS_OF_A_SEARCH:
            if getattr(asked, name) is not None:
                flag = "--" + name.replace("_", "-")
                fix = "add --tune 'key=log(0.01, 1)', or leave it out"
                raise UserError(flag, "given without --tune", fix)
    return grid_of(
        asked.tune,
        [100] if asked.tune_seed is None else asked.tune_seed,
        trials=asked.trials,
        trials_seed=asked.trials_seed,
        stop_early=asked.stop_early,
    )


def grid_of(
    given: Sequence[str],
    on: Sequence[int],
    validation: float = VALIDATION_SHARE,
    *,
    trials: int | None = None,
    trials_seed: int | None = None,
    stop_early: bool | None = None,
    file: str | None = None,
) -> Grid | None:
    """Return the grid of `key=value,value` and `key=log(a, b)` words; None without any.

    Args:
        given: The words.
        on: The seeds of the search.
        validation: The part of its training samples that a client keeps for the search.
        trials: How many trials are drawn from ranges; None for the usual number.
        trials_seed: The seed of these draws; None for 0.
        stop_early: Whether hopeless trials are stopped; None for those that are drawn.
        file: The name of the study that says so; None for options of a command.

    Raises:
        UserError: A key has fewer than two values, a range is none, or the options of draws are
            given without a range.
    """

    def name_of(option: str) -> str:
        """Return where the user has written an option."""
        if file is not None:
            return f"{file}: {option}"
        return "--" + option.replace("_", "-")

    values: dict[str, Sequence[str] | Range] = {}
    for word in given:
        key, _, written = word.partition("=")
        axis = range_of(written, word, name_of("tune"))
        if axis is not None:
            values[key] = axis
            continue
        listed_values = [value for value in written.split(",") if value]
        if len(listed_values) < 2:
            raise UserError(name_of("tune"), word, "give two or more values: key=.01,.03,.1")
        values[key] = listed_values
    if not values:
        return None

    is_drawn = any(isinstance(axis, Range) for axis in values.values())
    if not is_drawn:
        for option, value in (("trials", trials), ("trials_seed", trials_seed)):
            if value is not None:
                fix = "give a range, such as key=log(0.01, 1), or leave it out"
                raise UserError(name_of(option), f"{value}, and every value is listed", fix)
    if trials is not None and trials < 2:
        raise UserError(name_of("trials"), f"{trials}", "give 2 or more")
    return Grid(
        values,
        on,
        validation,
        trials=USUAL_TRIALS if trials is None else trials,
        draw_seed=0 if trials_seed is None else trials_seed,
        stops_early=is_drawn if stop_early is None else stop_early,
    )


def seed_list(words: str) -> list[int]:
    """Return the seeds of an argument such as `100`, `0-4` or `0,2,7-9`, each once.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    found: list[int] = []
    for part in words.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if ends is None:
            raise argparse.ArgumentTypeError(f"{words!r} is not like 0-4 or 0,2,7-9")
        first = int(ends[1])
        last = first if ends[2] is None else int(ends[2])
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def _seed(word: str) -> int:
    """Return the number of a seed.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 0")
    return int(word)
