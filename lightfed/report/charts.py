"""The pictures of a comparison beside its curves, for the runs that have got what they show.

Those of federations of levels, and of methods that are measured both after aggregation and after
local training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lightfed.report.dynamics import dynamic_figure
from lightfed.report.levels import Family, families
from lightfed.report.runfiles import RunFiles
from lightfed.report.sizes import combinations_figure, shares_figure
from lightfed.report.stages import Stages, stages, stages_figure, stages_heading
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

FILES = tuple(f"comparison-{name}-*.png" for name in ("stages", *KINDS))


def charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """All that may be drawn of the runs.

    None unless clients' models have different widths or were measured both after aggregation and
    after local training.
    """
    return [*map(_stages_chart, stages(runs)), *_level_charts(runs)]


def _stages_chart(found: Stages) -> Chart:
    return Chart(
        file=f"comparison-stages-{_slug(found.data)}.png",
        heading=stages_heading(found),
        caption=f"{STAGES_CAPTION} {SEEDS}" if found.repeated else STAGES_CAPTION,
        draw=partial(stages_figure, found),
    )


def _level_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    return [
        Chart(
            file=f"comparison-{name}-{_slug(family.name)}.png",
            heading=f"{family.name}: {readable(family.metric)} {kind.heading}",
            caption=f"{kind.caption} {SEEDS}" if family.repeated else kind.caption,
            draw=partial(kind.draw, family),
        )
        for family in families(runs)
        for name, kind in KINDS.items()
    ]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
