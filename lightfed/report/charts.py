"""The pictures of a comparison in addition to its curves.

They show runs with model levels, FlexiFed's strategies, clouds of servers, pFedMoE and its rivals,
and methods measured both after aggregation and after local training. templates/comparison.html
explains how to read each kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lightfed.drawing.style import Theme
from lightfed.results.groups import repeated
from lightfed.results.run import Run
from lightfed.results.tables import readable
from lightfed.studies.fedbcd.clouds import clouds, rounds_figure, times_figure, traffic_figure
from lightfed.studies.flexifed.stages import stages, stages_figure
from lightfed.studies.flexifed.strategies import studies
from lightfed.studies.flexifed.strategy_plots import courses_figure, factors_figure
from lightfed.studies.heterofl.dynamics import dynamic_figure
from lightfed.studies.heterofl.levels import families
from lightfed.studies.heterofl.sizes import combinations_figure, shares_figure
from lightfed.studies.pfedmoe.method_plots import (
    costs_figure,
    differences_figure,
    robustness,
    robustness_figure,
)
from lightfed.studies.pfedmoe.methods import OURS, protocols

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLOUDS = {
    "rounds": ("of sync clouds", rounds_figure),
    "times": ("against virtual time", times_figure),
    "traffic": ("against bytes between servers", traffic_figure),
}
LEVELS = {
    "sizes": ("against model size", combinations_figure),
    "shares": ("between two levels", shares_figure),
    "dynamic": ("with fixed and with dynamic levels", dynamic_figure),
}
KINDS = ("stages", "strategies", "factors", *CLOUDS, "differences", "costs", "robustness", *LEVELS)
FILES = tuple(f"comparison-{kind}-*.png" for kind in KINDS)


@dataclass(frozen=True)
class Chart:
    """One picture of a comparison.

    Attributes:
        kind: one of KINDS.
        name: of its subject.
        heading: above the picture on the page, and its alternative text.
        draw: makes the figure; None if the runs lack the data.
        repeated: whether it shows means and deviations over several seeds.
    """

    kind: str
    name: str
    heading: str
    draw: Callable[[Theme], Figure | None]
    repeated: bool = False

    @property
    def file(self) -> str:
        """Its name in the folder of the comparison."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"comparison-{self.kind}-{slug}.png"


def charts(runs: Sequence[Run], *, target: float | None = None) -> list[Chart]:
    """The charts that apply to these runs.

    Args:
        runs: to compare.
        target: value of the metric to reach. By default, for strategies what Clustered-FL reached,
            and for the costs of methods what all of them reached.
    """
    return [
        *_of_strategies(runs, target),
        *_of_clouds(runs),
        *_of_methods(runs, target),
        *_of_levels(runs),
    ]


def _of_strategies(runs: Sequence[Run], target: float | None) -> Iterator[Chart]:
    for one in stages(runs):
        draw = partial(stages_figure, one)
        yield Chart("stages", one.name, one.heading, draw, repeated(one.members))
    for study in studies(runs):
        name, metric = study.topic.name, readable(study.topic.metric)
        compared = [setting for setting in study.settings if len(setting.trials) > 1]
        for i, setting in enumerate(compared):
            heading = f"{setting.name}: {metric} by strategy"
            draw = partial(courses_figure, setting, target)
            several = repeated(setting.trials.values())
            yield Chart("strategies", f"{name} {i + 1}" if i else name, heading, draw, several)
        heading = f"{name}: {metric} by versions, clients and common layers"
        draw, several = partial(factors_figure, study), repeated(study.trials)
        yield Chart("factors", name, heading, draw, several)


def _of_clouds(runs: Sequence[Run]) -> Iterator[Chart]:
    for one in clouds(runs):
        for kind, (end, figure) in CLOUDS.items():
            heading = f"{one.name}: {readable(one.metric)} {end}"
            yield Chart(kind, one.name, heading, partial(figure, one), repeated(one.members))


def _of_methods(runs: Sequence[Run], target: float | None) -> Iterator[Chart]:
    found = protocols(runs)
    for one in found:
        heading = f"{one.name}: {OURS} against the best baseline, by client"
        draw = partial(differences_figure, one)
        yield Chart("differences", one.name, heading, draw, repeated(one.members))
        heading = f"{one.name}: bytes and FLOPs to a target"
        yield Chart("costs", one.name, heading, partial(costs_figure, one, target))
    for study in robustness(found):
        yield Chart("robustness", study.name, study.name, partial(robustness_figure, study))


def _of_levels(runs: Sequence[Run]) -> Iterator[Chart]:
    for family in families(runs):
        for kind, (end, figure) in LEVELS.items():
            heading = f"{family.name}: {readable(family.metric)} {end}"
            yield Chart(
                kind, family.name, heading, partial(figure, family), repeated(family.members)
            )
