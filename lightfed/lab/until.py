"""`lightfed compare A B --until decided`: seeds are run in batches until the answer is known.

Each batch ends with a look, and the looks are fixed before the first run (`results.sequential`).
The same command again reads the same looks, in the same order, and gives the same answer.
"""

import math
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightfed.lab.contest import Entered, Grid, Held, Method, Needed, Submitted, Way, enter
from lightfed.lab.results import text
from lightfed.lab.results.paired import Verdict
from lightfed.lab.results.sequential import Design, Look
from lightfed.lab.results.verdicts import (
    are_identical,
    direction_of,
    excluded_text,
    gain_text,
    p_text,
)
from lightfed.utils.errors import UserError

DECIDED = "decided"  # the only value of --until

# The largest number of seeds by default, and the largest that may be asked for: up to there the
# boundaries are accurate.
USUAL = 20
MOST = 100


class Ended(NamedTuple):
    """A comparison that has ended.

    Attributes:
        held: The runs of the seeds until the look at which it ended.
        design: The looks.
        look: The look at which it ended.
        p_values: The p value of each look so far.
        identical: Whether all runs of both methods are the same.
        out_of_budget: Whether it ended because further runs would cost too much.
    """

    held: Held
    design: Design
    look: Look
    p_values: list[float]
    identical: bool
    out_of_budget: bool = False

    @property
    def is_over(self) -> bool:
        """Whether no further look is taken."""
        return self.identical or self.look.ends

    @property
    def verdict(self) -> Verdict:
        """Whether B is better than A."""
        if self.identical:
            return "identical runs"
        if not self.look.shown:
            return "not shown"
        gain = direction_of(self.held.metric) * self.look.difference.mean
        return "better" if gain > 0 else "worse"

    @property
    def why(self) -> str:
        """Why it ended, in a word or two."""
        if self.identical:
            return "identical runs"
        if self.look.shown:
            return DECIDED
        if self.out_of_budget:
            return "budget"
        return "last look" if self.look.number == len(self.design.looks) else "futile"

    @property
    def line(self) -> str:
        """The answer and why the comparison ended, in one line."""
        a, b = self.held.groups
        at = f"look {self.look.number} of {len(self.design.looks)}"
        seeds = self.look.difference.seeds
        if self.identical:
            return (
                f"identical runs: {b.name} and {a.name} have the same metrics in every round, "
                f"{text.counted(len(seeds), 'seed')} ({text.seeds_text(seeds)}); ended at {at}"
            )

        line = "no difference is shown"
        if self.look.shown:
            line = f"{b.name} is {self.verdict} than {a.name}"
        metric = self.held.metric
        gain = gain_text(self.look.difference, metric, half=self.look.half)
        line += f": {text.readable(metric)} {gain}"

        p = f"p {p_text(self.look.p)} where {p_text(self.look.boundary)} is needed"
        if self.look.shown:
            return f"{line}; decided at {at}, {p}"
        excluded = excluded_text(self.look.difference, metric, half=self.look.half)
        if self.why == "futile":
            chance = f"{100 * self.look.predictive:.0f} %"
            ending = f"given up at {at}, {p}: the last look would show a difference with {chance}"
        elif self.why == "budget":
            ending = f"the budget ended after {at}, {p}"
        else:
            ending = f"not decided by {at}, {p}"
        return f"{line}; {ending}; {excluded}"

    @property
    def numbers(self) -> dict[str, Any]:
        """What differs from the numbers of a comparison whose seeds are fixed."""
        gain, deterioration = self.look.difference.excluded(
            direction_of(self.held.metric), half=self.look.half
        )
        predictive = self.look.predictive
        return {
            "verdict": self.verdict,
            "p": self.look.p,
            "excluded": {"gain": gain, "deterioration": deterioration},
            "sequential": {
                "looks": list(self.design.looks),
                "spending": self.design.spending,
                "level": self.design.level,
                "futility": self.design.futility,
                "boundaries": list(self.design.boundaries()),
                "look": self.look.number,
                "ended": self.why,
                "predictive": predictive if math.isfinite(predictive) else None,
                "overall_p": self.design.overall_p(self.p_values),
                "low": self.look.difference.mean - self.look.half,
                "high": self.look.difference.mean + self.look.half,
            },
        }


def hold_until(
    methods: Sequence[Method],
    seeds: Sequence[int],
    design: Design,
    way: Way,
    *,
    grid: Grid | None = None,
    metric: str | None = None,
    differ: Sequence[str] = (),
) -> Ended:
    """Run the seeds of one look after the other until the comparison of two methods ends.

    Args:
        methods: The method that is compared with, and the other one.
        seeds: The seeds in their order, as many as the last look has.
        design: The looks.
        way: How missing runs are run. Submitted runs end the process at each look that lacks some.
        grid: The search for the best values of each method; None for no search.
        metric: A column of metrics.csv; by default the first that all runs have.
        differ: Keys in which methods may differ, though they decide what is measured.

    Raises:
        UserError: As `contest.hold`; or a method failed in some seeds.
        Submitted: What is missing has been submitted.
    """
    looks_note, *_ = described(design)
    print(looks_note, file=sys.stderr)

    # A metric that no run has ends the comparison after its first run.
    needed = [] if metric is None else [Needed("--metric", metric)]
    entered = enter(methods, seeds, way, grid=grid, metric=metric, needed=needed, differ=differ)
    for ended in looks_at(entered, seeds, design, way):
        if ended.is_over:
            return ended
    raise AssertionError("the last look ends a comparison")


def looks_at(entered: Entered, seeds: Sequence[int], design: Design, way: Way) -> Iterator[Ended]:
    """Yield what is known after each look, until the comparison of two methods is over.

    The runs of a look are run when it is asked for. See `hold_until` for arguments and errors.
    """
    p_values: list[float] = []
    for n in design.looks:
        held = _run_batch(entered, seeds[:n], way)
        a, b = held.groups
        values = _differences(held, seeds[:n])
        look = design.look(values, seeds[:n])
        assert look is not None, "there are the seeds of a look"

        p_values.append(look.p)
        ended = Ended(held, design, look, p_values, are_identical(a, b))
        if not ended.is_over:
            print(_progress(ended), file=sys.stderr)
        yield ended
        if ended.is_over:
            return
        # The metric of all looks is that of the first.
        entered = entered._replace(metric=held.metric)


def _run_batch(entered: Entered, seeds: Sequence[int], way: Way) -> Held:
    """Run what is missing of these seeds.

    Raises:
        UserError: A method failed in some of them.
    """
    try:
        return entered.run(seeds, way)
    except Submitted:
        raise
    except SystemExit as failed:
        was_stopped = isinstance(failed.code, int) and failed.code > 128
        unfinished = _unfinished(entered, seeds)
        if was_stopped or not unfinished:
            raise
        fix = "change what fails; finished runs are kept"
        raise UserError("--until", f"runs failed: {unfinished}", fix) from failed


def _unfinished(entered: Entered, seeds: Sequence[int]) -> str:
    """Return which seeds of which methods have no finished run; empty if all have."""
    parts = []
    for name, wanted in entered.winners.items():
        missing = [seed for seed in seeds if wanted.at(seed).finished() is None]
        if missing:
            parts.append(f"{name} in {_seeds_words(missing)}")
    return ", ".join(parts)


def _differences(held: Held, seeds: Sequence[int]) -> list[float]:
    """Return the difference of each seed.

    Raises:
        UserError: A method has no finite value in some of them.
    """
    parts = []
    finals = []
    for group in held.groups:
        values = group.finals(held.metric)
        missing = [seed for seed in seeds if not math.isfinite(values.get(seed, math.nan))]
        if missing:
            parts.append(f"{group.name} in {_seeds_words(missing)}")
        finals.append(values)
    if parts:
        found = f"no finite {held.metric}: {', '.join(parts)}"
        raise UserError("--until", found, "give values that do not fail, or another --metric")

    of_a, of_b = finals
    return [of_b[seed] - of_a[seed] for seed in seeds]


def _seeds_words(seeds: Sequence[int]) -> str:
    word = "seed" if len(seeds) == 1 else "seeds"
    return f"{word} {text.seeds_text(sorted(seeds))}"


def _progress(ended: Ended) -> str:
    """Return what is said of a look that does not end the comparison."""
    look = ended.look
    return (
        f"look {look.number} of {len(ended.design.looks)}: "
        f"{gain_text(look.difference, ended.held.metric)}, "
        f"p {p_text(look.p)} where {p_text(look.boundary)} is needed: it goes on"
    )


# The design.


def described(design: Design) -> list[str]:
    """Return the design in words, as notes."""
    level = f"{100 * design.level:g} %"
    counts = [str(n) for n in design.looks]
    after = counts[0] if len(counts) == 1 else f"{', '.join(counts[:-1])} and {counts[-1]}"
    limits = ", ".join(p_text(p) for p in design.boundaries())
    return [
        f"looks after {after} seeds, fixed in advance; the error of all looks together is {level}, "
        f"spent by the {design.spending}-like function of Lan and DeMets (1983); "
        f"a difference is shown at p {limits}, from the joint distribution of the t statistics",
        "given up if the last look would show a difference with a predictive probability below "
        f"{100 * design.futility:g} % (not binding: the error is {level} without it)",
        f"a difference of {design.detectable():.2f} standard deviations of the paired differences "
        "is found in 80 % of such comparisons, by simulation",
        "the interval of the answer holds at all looks together; those of the table are each by "
        "itself, as if the number of seeds had been fixed",
    ]


def look_list(words: str) -> list[int]:
    """The numbers of an argument such as `5,8,12,16,20`.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if re.fullmatch(r"\d{1,6}(,\d{1,6})*", words) is None:
        raise ArgumentTypeError(f"{words!r} is not like 5,8,12,16,20")
    return [int(word) for word in words.split(",")]


def design_of(
    until: str | None, most: int | None, looks: Sequence[int] | None, seeds: Sequence[int] | None
) -> tuple[Design, list[int]] | None:
    """Return the design that options ask for, and its seeds; None without `--until`.

    Args:
        until: The value of `--until`, if it is given.
        most: That of `--most`.
        looks: That of `--looks`.
        seeds: That of `--seeds`. By default they are 0, 1, 2, ...

    Raises:
        UserError: The options do not fit each other.
    """
    if until is None:
        for flag, value in (("--most", most), ("--looks", looks)):
            if value is not None:
                found = f"given without --until {DECIDED}"
                raise UserError(flag, found, f"add --until {DECIDED}, or leave it out")
        return None

    if looks is not None:
        _check_looks(looks, most)
        design = Design(tuple(looks))
    else:
        number = most
        if number is None:
            number = USUAL if seeds is None else len(seeds)
        if number < 2:
            raise UserError(
                "--most", text.counted(number, "seed"), "give 2 or more: one has no spread"
            )
        design = Design.up_to(number)

    if design.most > MOST:
        flag = "--most" if looks is None else "--looks"
        raise UserError(flag, f"{design.most} seeds", f"give at most {MOST}")
    if seeds is None:
        return design, list(range(design.most))
    if len(seeds) != design.most:
        found = f"{text.counted(len(seeds), 'seed')}, and the last look has {design.most}"
        raise UserError("--seeds", found, "give as many, or leave them out")
    return design, list(seeds)


def _check_looks(looks: Sequence[int], most: int | None) -> None:
    """Refuse looks that are not ascending, have a single seed, or do not end with `--most`."""
    named = ",".join(map(str, looks))
    if list(looks) != sorted(set(looks)):
        raise UserError("--looks", named, "give ascending numbers of seeds, such as 5,8,12,16,20")
    if looks[0] < 2:
        raise UserError("--looks", named, "begin with 2 seeds or more: one has no spread")
    if most is not None and looks[-1] != most:
        found = f"{named}, and --most is {most}"
        raise UserError("--looks", found, f"end with {most}, or leave --most out")
