"""The pictures of a comparison beside its curves, for the runs that have got what they show.

Those of federations of levels, of FlexiFed's strategies, of clouds of servers, of pFedMoE and what
it is compared with, and of methods that are measured both after aggregation and after local
training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lightfed.report.clouds import Clouds, clouds, rounds_figure, times_figure
from lightfed.report.dynamics import dynamic_figure
from lightfed.report.levels import Family, families
from lightfed.report.method_plots import (
    Robustness,
    costs_figure,
    differences_figure,
    robustness,
    robustness_figure,
)
from lightfed.report.methods import OURS, Protocol, protocols
from lightfed.report.runfiles import RunFiles
from lightfed.report.sizes import combinations_figure, shares_figure
from lightfed.report.stages import Stages, stages, stages_figure, stages_heading
from lightfed.report.strategies import Study, repeated, studies
from lightfed.report.strategy_plots import courses_figure, factors_figure
from lightfed.report.style import Theme
from lightfed.report.tables import readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = "Runs that differ in the seed alone are drawn as their mean +- sample standard deviation."


@dataclass(frozen=True)
class Kind:
    """A kind of chart: the end of its heading, how to read it, and what draws it."""

    heading: str
    caption: str
    draw: Callable[[Family, Theme], Figure | None]


@dataclass(frozen=True)
class Chart:
    """One picture of a comparison.

    Attributes:
        file: its name in the folder of the comparison.
        heading: over the picture on the page, and its alternative text.
        caption: how to read it.
        draw: the figure, None where the runs have not got what it shows.
    """

    file: str
    heading: str
    caption: str
    draw: Callable[[Theme], Figure | None]


KINDS = {
    "sizes": Kind(
        "against model size",
        "A point is a combination of levels, with equal shares of the clients unless its name "
        "tells others. It stands at the mean number of parameters of the clients' models.",
        combinations_figure,
    ),
    "shares": Kind(
        "between two levels",
        "Along a line the share of the wider level grows from left to right; at its ends all "
        "clients are of one level.",
        shares_figure,
    ),
    "dynamic": Kind(
        "with fixed and with dynamic levels",
        "Fixed: a client keeps its level. Dynamic: it draws its level anew for every round.",
        dynamic_figure,
    ),
}

STAGES_CAPTION = (
    "The clients' own test samples. Without a server: a client's model as it is aggregated from "
    "its neighbours', before and after its local training of that round. With a server: the "
    "server's model, and, where it was measured, each client's copy after local training."
)

STRATEGIES_CAPTION = (
    "Each client's own model on its own test samples, mean over the clients: all of them, then "
    "those of each version. Dotted: the target that tells the speed."
)
FACTORS_CAPTION = (
    "Along a line only what is below it differs; the values stand at equal distances. A point is "
    "an experiment; a line goes through their means."
)

CLOUDS_CAPTION = (
    "Personal: each device's own model on its own test samples, mean over the devices. Global: the "
    "servers' models on the whole test set, mean over the servers. "
)
ROUNDS_CAPTION = CLOUDS_CAPTION + "In a round all servers take part."
TIMES_CAPTION = CLOUDS_CAPTION + (
    "Servers wait for their slowest active device, the coordinator for the first B of N servers. "
    "Methods with one model for all wait for every server."
)

DIFFERENCES_CAPTION = (
    "Each client's own model on its own test samples at the last evaluation; a difference is that "
    "of two runs of one seed, whose clients hold the same data."
)
COSTS_CAPTION = (
    "Until the mean over the clients was first measured to be as good as the target; mean over the "
    "seeds."
)
ROBUSTNESS_CAPTION = "Along a line only what is below it differs; bars are deviations over seeds."

PICTURES = (
    *("stages", "strategies", "factors", "rounds", "times"),
    *("differences", "costs", "robustness", *KINDS),
)
FILES = tuple(f"comparison-{name}-*.png" for name in PICTURES)


def charts(runs: Sequence[RunFiles], *, target: float | None = None) -> list[Chart]:
    """All that may be drawn of the runs.

    None unless clients' models have different widths, strategies of FlexiFed, clouds of servers or
    pFedMoE beside another method were run, or clients were measured both after aggregation and
    after local training.

    Args:
        runs: those that are compared.
        target: of the metric, drawn with the strategies; None: what Clustered-FL reached. Of the
            costs of methods; None: what all of them reached.
    """
    found = studies(runs)
    return [
        *map(_stages_chart, stages(runs)),
        *(chart for study in found for chart in _strategy_charts(study, target)),
        *(chart for one in clouds(runs) for chart in _cloud_charts(one)),
        *_method_charts(protocols(runs), target),
        *_level_charts(runs),
    ]


def _stages_chart(found: Stages) -> Chart:
    return Chart(
        file=f"comparison-stages-{_slug(found.data)}.png",
        heading=stages_heading(found),
        caption=_of_seeds(STAGES_CAPTION, several=found.repeated),
        draw=partial(stages_figure, found),
    )


def _strategy_charts(study: Study, target: float | None) -> list[Chart]:
    metric = readable(study.topic.metric)
    courses = [
        Chart(
            file=f"comparison-strategies-{_slug(study.topic.name)}{f'-{i + 1}' if i else ''}.png",
            heading=f"{setting.name}: {metric} by strategy",
            caption=_of_seeds(STRATEGIES_CAPTION, several=repeated([*setting.trials.values()])),
            draw=partial(courses_figure, setting, target),
        )
        for i, setting in enumerate(s for s in study.settings if len(s.trials) > 1)
    ]
    factors = Chart(
        file=f"comparison-factors-{_slug(study.topic.name)}.png",
        heading=f"{study.topic.name}: {metric} by versions, clients and common layers",
        caption=_of_seeds(FACTORS_CAPTION, several=repeated(study.trials)),
        draw=partial(factors_figure, study),
    )
    return [*courses, factors]


def _cloud_charts(found: Clouds) -> list[Chart]:
    metric = readable(found.metric)
    return [
        Chart(
            file=f"comparison-rounds-{_slug(found.name)}.png",
            heading=f"{found.name}: {metric} of sync clouds",
            caption=_of_seeds(ROUNDS_CAPTION, several=found.repeated),
            draw=partial(rounds_figure, found),
        ),
        Chart(
            file=f"comparison-times-{_slug(found.name)}.png",
            heading=f"{found.name}: {metric} against virtual time",
            caption=_of_seeds(TIMES_CAPTION, several=found.repeated),
            draw=partial(times_figure, found),
        ),
    ]


def _method_charts(found: Sequence[Protocol], target: float | None) -> list[Chart]:
    per_protocol = [
        chart
        for one in found
        for chart in (
            Chart(
                file=f"comparison-differences-{_slug(one.name)}.png",
                heading=f"{one.name}: {OURS} against the best baseline, by client",
                caption=_of_seeds(DIFFERENCES_CAPTION, several=one.repeated),
                draw=partial(differences_figure, one),
            ),
            Chart(
                file=f"comparison-costs-{_slug(one.name)}.png",
                heading=f"{one.name}: bytes and FLOPs to a target",
                caption=COSTS_CAPTION,
                draw=partial(costs_figure, one, target),
            ),
        )
    ]
    return [*per_protocol, *map(_robustness_chart, robustness(found))]


def _robustness_chart(found: Robustness) -> Chart:
    return Chart(
        file=f"comparison-robustness-{_slug(found.name)}.png",
        heading=found.name,
        caption=ROBUSTNESS_CAPTION,
        draw=partial(robustness_figure, found),
    )


def _level_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    return [
        Chart(
            file=f"comparison-{name}-{_slug(family.name)}.png",
            heading=f"{family.name}: {readable(family.metric)} {kind.heading}",
            caption=_of_seeds(kind.caption, several=family.repeated),
            draw=partial(kind.draw, family),
        )
        for family in families(runs)
        for name, kind in KINDS.items()
    ]


def _of_seeds(caption: str, *, several: bool) -> str:
    return f"{caption} {SEEDS}" if several else caption


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
