"""The pictures of a comparison beside its curves, for the runs that have got what they show.

Those of federations of levels, of FlexiFed's strategies, of clouds of servers, of pFedMoE and what
it is compared with, and of methods that are measured both after aggregation and after local
training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lightfed.drawing.style import Theme
from lightfed.results.groups import Experiment, Group, repeated
from lightfed.results.runfiles import RunFiles
from lightfed.results.tables import readable
from lightfed.studies.fedbcd.clouds import (
    Clouds,
    clouds,
    rounds_figure,
    times_figure,
    traffic_figure,
)
from lightfed.studies.flexifed.stages import Stages, stages, stages_figure, stages_heading
from lightfed.studies.flexifed.strategies import Study, studies
from lightfed.studies.flexifed.strategy_plots import courses_figure, factors_figure
from lightfed.studies.heterofl.dynamics import dynamic_figure
from lightfed.studies.heterofl.levels import Family, families
from lightfed.studies.heterofl.sizes import combinations_figure, shares_figure
from lightfed.studies.pfedmoe.method_plots import (
    costs_figure,
    differences_figure,
    robustness,
    robustness_figure,
)
from lightfed.studies.pfedmoe.methods import OURS, Protocol, protocols

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Theme], "Figure | None"]

SEEDS = "Runs that differ in the seed alone are drawn as their mean +- sample standard deviation."


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
    draw: Draw


# of federations of levels: the end of the heading, how to read it, and what draws it
KINDS: dict[str, tuple[str, str, Callable[[Family, Theme], Figure | None]]] = {
    "sizes": (
        "against model size",
        "A point is a combination of levels, with equal shares of the clients unless its name "
        "tells others. It stands at the mean number of parameters of the clients' models.",
        combinations_figure,
    ),
    "shares": (
        "between two levels",
        "Along a line the share of the wider level grows from left to right; at its ends all "
        "clients are of one level.",
        shares_figure,
    ),
    "dynamic": (
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
    "What each client holds on its own test samples, mean over the clients: all of them, then "
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
TRAFFIC_CAPTION = CLOUDS_CAPTION + (
    "Servers and coordinator send each other one model up and one down for every server that is "
    "waited for; what devices send is not among these bytes."
)

DIFFERENCES_CAPTION = (
    "What each client holds on its own test samples at the last evaluation; a difference is that "
    "of two runs of one seed, whose clients hold the same data."
)
COSTS_CAPTION = (
    "Until the mean over the clients was first measured to be as good as the target; mean over the "
    "seeds."
)
ROBUSTNESS_CAPTION = "Along a line only what is below it differs; bars are deviations over seeds."

PICTURES = (
    *("stages", "strategies", "factors", "rounds", "times", "traffic"),
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
    return [
        *map(_stages_chart, stages(runs)),
        *(chart for study in studies(runs) for chart in _strategy_charts(study, target)),
        *(chart for one in clouds(runs) for chart in _cloud_charts(one)),
        *_method_charts(protocols(runs), target),
        *(chart for family in families(runs) for chart in _level_charts(family)),
    ]


def _stages_chart(found: Stages) -> Chart:
    caption = _of_seeds(STAGES_CAPTION, [method.group for method in found.methods])
    draw = partial(stages_figure, found)
    return _chart("stages", found.data, stages_heading(found), caption, draw)


def _strategy_charts(study: Study, target: float | None) -> list[Chart]:
    name, metric = study.topic.name, readable(study.topic.metric)
    courses = [
        _chart(
            "strategies",
            f"{name} {i + 1}" if i else name,
            f"{setting.name}: {metric} by strategy",
            _of_seeds(STRATEGIES_CAPTION, setting.trials.values()),
            partial(courses_figure, setting, target),
        )
        for i, setting in enumerate(s for s in study.settings if len(s.trials) > 1)
    ]
    heading = f"{name}: {metric} by versions, clients and common layers"
    caption = _of_seeds(FACTORS_CAPTION, study.trials)
    return [*courses, _chart("factors", name, heading, caption, partial(factors_figure, study))]


def _cloud_charts(found: Clouds) -> list[Chart]:
    kinds = (
        ("rounds", "of sync clouds", ROUNDS_CAPTION, rounds_figure),
        ("times", "against virtual time", TIMES_CAPTION, times_figure),
        ("traffic", "against bytes between servers", TRAFFIC_CAPTION, traffic_figure),
    )
    start, own = f"{found.name}: {readable(found.metric)}", found.members
    return [
        _chart(kind, found.name, f"{start} {end}", _of_seeds(text, own), partial(draw, found))
        for kind, end, text, draw in kinds
    ]


def _method_charts(found: Sequence[Protocol], target: float | None) -> list[Chart]:
    made = []
    for one in found:
        heading = f"{one.name}: {OURS} against the best baseline, by client"
        caption = _of_seeds(DIFFERENCES_CAPTION, one.methods)
        draw = partial(differences_figure, one)
        made.append(_chart("differences", one.name, heading, caption, draw))
        heading = f"{one.name}: bytes and FLOPs to a target"
        draw = partial(costs_figure, one, target)
        made.append(_chart("costs", one.name, heading, COSTS_CAPTION, draw))
    for study in robustness(found):
        draw = partial(robustness_figure, study)
        made.append(_chart("robustness", study.name, study.name, ROBUSTNESS_CAPTION, draw))
    return made


def _level_charts(family: Family) -> list[Chart]:
    start, own = f"{family.name}: {readable(family.metric)}", family.mixtures
    return [
        _chart(kind, family.name, f"{start} {end}", _of_seeds(text, own), partial(draw, family))
        for kind, (end, text, draw) in KINDS.items()
    ]


def _chart(kind: str, name: str, heading: str, caption: str, draw: Draw) -> Chart:
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Chart(f"comparison-{kind}-{slug}.png", heading, caption, draw)


def _of_seeds(caption: str, groups: Iterable[Experiment | Group]) -> str:
    return f"{caption} {SEEDS}" if repeated(groups) else caption
