"""All figures of single papers, for the runs that are of their kind."""

from __future__ import annotations

from collections.abc import Sequence

from lightfed.drawing.charts import Figure
from lightfed.results.run import Run
from lightfed.studies.dispfl.similarity import similarity_figure
from lightfed.studies.fedbcd.clouds import clouds, rounds_figure, times_figure, traffic_figure
from lightfed.studies.flexifed.stages import stages, stages_figure
from lightfed.studies.flexifed.strategies import studies
from lightfed.studies.flexifed.strategy_figures import courses_figure, factors_figure
from lightfed.studies.heterofl.levels import families
from lightfed.studies.heterofl.sizes import dynamic_figure, shares_figure, sizes_figure
from lightfed.studies.pfedmoe.gates import gates_figure
from lightfed.studies.pfedmoe.method_figures import (
    costs_figure,
    differences_figure,
    robustness,
    robustness_figure,
)
from lightfed.studies.pfedmoe.methods import protocols


def figures_of_run(run: Run) -> list[Figure]:
    """Of one run."""
    found = (gates_figure(run), similarity_figure(run))
    return [figure for figure in found if figure is not None]


def study_figures(runs: Sequence[Run], *, target: float | None = None) -> list[Figure]:
    """Those that apply to these runs.

    The target is a value of the metric. By default it is for strategies what Clustered-FL reached,
    and for the costs of methods what all of them reached.
    """
    compared = protocols(runs)
    found = [stages_figure(one) for one in stages(runs)]
    for study in studies(runs):
        found += [courses_figure(s, target) for s in study.settings if len(s.trials) > 1]
        found.append(factors_figure(study))
    for cloud in clouds(runs):
        found += [draw(cloud) for draw in (rounds_figure, times_figure, traffic_figure)]
    for one in compared:
        found += [differences_figure(one), costs_figure(one, target)]
    found += map(robustness_figure, robustness(compared))
    for family in families(runs):
        found += [draw(family) for draw in (sizes_figure, shares_figure, dynamic_figure)]
    return [figure for figure in found if figure is not None]
