"""By how much one experiment beats another, seed by seed, with a confidence interval.

Two runs with the same seed have the same clients, data and draws, so experiments are compared per
seed. The interval is that of a paired t-test over the seeds; a single seed has none. The time to a
target has the resolution of the evaluations: the number of rounds between two of them.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightfed.results.groups import Group
from lightfed.results.outcome import mean_and_std, t_half_width
from lightfed.results.run import Run
from lightfed.results.tables import readable
from lightfed.results.units import direction, is_share, metric_text

INTERVAL = "95 % paired t interval"
CHOSEN = "The best rival is chosen on the same runs, and each interval holds for its own pair only."
BETTER, WORSE, UNDECIDED = "better", "worse", "no difference shown"
ALONE, APART = "one seed shows no interval", "no seed in common"


@dataclass(frozen=True)
class Paired:
    """The final metric of an experiment compared with that of a rival.

    Attributes:
        metric: its name without the kind (`personal/`).
        seeds: those for which both have a final value, ascending.
        own_only: seeds for which only the experiment has one; rival_only: only the rival.
        difference: mean over the seeds; positive if the experiment is better, also for a metric
            that should be low. NaN without a common seed.
        low: lower end of the interval, NaN below two seeds; high: its upper end.
    """

    metric: str
    seeds: tuple[int, ...]
    own_only: tuple[int, ...]
    rival_only: tuple[int, ...]
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if not self.seeds:
            return APART
        if math.isnan(self.low):
            return ALONE
        return BETTER if self.low > 0 else WORSE if self.high < 0 else UNDECIDED

    @property
    def interval(self) -> str:
        """`1.20 to 3.80`, empty below two seeds."""
        ends = [_signed(self.metric, end).removeprefix("+") for end in (self.low, self.high)]
        return "" if math.isnan(self.low) else " to ".join(ends)

    @property
    def gain(self) -> str:
        """The difference in percentage points, or in the metric's unit."""
        return _signed(self.metric, self.difference)

    @property
    def seeds_label(self) -> str:
        """`3 seeds (0-2)`."""
        return f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)} ({seeds_text(self.seeds)})"

    def lacking(self, own: str, rival: str) -> str:
        """`FML lacks seed 2`; empty if both have all seeds."""
        return ", ".join(
            f"{name} lacks seed{'s' * (len(seeds) > 1)} {seeds_text(seeds)}"
            for name, seeds in ((own, self.rival_only), (rival, self.own_only))
            if seeds
        )

    def sentence(self, own: str, rival: str, *, role: str = "") -> str:
        """`+2.50 points over FML, 95 % paired t interval 1.20 to 3.80, 3 seeds (0-2): better`.

        `role` is that of the rival, such as `the best baseline`.
        """
        over = f"over {rival}{f', {role}' if role else ''}"
        if not self.seeds:
            return f"{over}: {APART}"
        unit = " points" if is_share(self.metric) else ""
        interval = f"{INTERVAL} {self.interval}" if self.interval else ""
        parts = (f"{self.gain}{unit} {over}", interval, self.seeds_label, self.lacking(own, rival))
        return f"{', '.join(filter(None, parts))}: {self.verdict}"


def paired(own: Group, rival: Group, metric: str, columns: tuple[str, str]) -> Paired:
    """Compare two experiments, each by its own column of metrics.csv."""
    mine, theirs = (_finals(g, c) for g, c in zip((own, rival), columns, strict=True))
    seeds = sorted(mine.keys() & theirs.keys())
    mean, std = mean_and_std([direction(metric) * (mine[seed] - theirs[seed]) for seed in seeds])
    half = t_half_width(std, len(seeds))
    mine_only, theirs_only = (
        sorted(mine.keys() - theirs.keys()),
        sorted(theirs.keys() - mine.keys()),
    )
    only = tuple(mine_only), tuple(theirs_only)
    return Paired(metric, tuple(seeds), *only, mean, mean - half, mean + half)


def goal_text(column: str, target: float) -> str:
    """`79.76 % personal accuracy`."""
    return f"{metric_text(column, target)} {readable(column)}"


def resolution_text(runs: Iterable[Run], column: str) -> str:
    """`4 rounds`, `4 to 40 rounds`: the most between two evaluations; empty without any."""
    found = sorted({steps for run in runs if (steps := resolution(run, column))})
    ends = " to ".join(dict.fromkeys(map(str, (*found[:1], *found[-1:]))))
    return f"{ends} round{'s' * (found[-1] != 1)}" if found else ""


def resolution(run: Run, column: str) -> int:
    """The most rounds between two evaluations of a column; 0 where there was none."""
    measured = run.series(column).dropna().index
    return int(np.diff(measured, prepend=0).max(initial=0))


def seeds_text(seeds: Sequence[int]) -> str:
    """`0-2 13-25`."""
    # within a stretch of consecutive seeds, seed minus position is constant
    stretches = itertools.groupby(enumerate(seeds), key=lambda pair: pair[1] - pair[0])
    found = [[seed for _, seed in stretch] for _, stretch in stretches]
    return " ".join("-".join(str(s) for s in dict.fromkeys((own[0], own[-1]))) for own in found)


def _finals(group: Group, column: str) -> dict[int, float]:
    """The last value of each seed's run; unfinished runs have no final value."""
    finals = {run.seed: run.final(column) for run in group.runs if run.finished}
    return {s: value for s, value in finals.items() if s is not None and math.isfinite(value)}


def _signed(metric: str, value: float) -> str:
    return f"{100 * value:+.2f}" if is_share(metric) else f"{value:+.3g}"
