"""All figures and tables of single papers, for the runs that are of their kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pandas import DataFrame

from lightfed.drawing.charts import Figure
from lightfed.results.run import Run
from lightfed.studies import dispfl, fedbcd, flexifed, heterofl, pfedmoe


@dataclass(frozen=True)
class StudyTable:
    """Cells of text, the first two columns names, and how to read them."""

    title: str
    cells: DataFrame
    notes: list[str]


def figures_of_run(run: Run) -> list[Figure]:
    """Of one run."""
    found = (pfedmoe.gates_figure(run), dispfl.similarity_figure(run))
    return [figure for figure in found if figure is not None]


def study_figures(runs: Sequence[Run], *, target: float | None = None) -> list[Figure]:
    """Those that apply to these runs.

    The target is a value of the metric. By default it is for strategies what Clustered-FL reached,
    and for the costs of methods what all of them reached.
    """
    studies = (dispfl, flexifed, pfedmoe, fedbcd, heterofl)
    return [figure for study in studies for figure in study.figures(runs, target=target)]


def study_tables(runs: Sequence[Run], *, target: float | None = None) -> list[StudyTable]:
    """FlexiFed's strategies by version, and pFedMoE and its rivals; the target as above."""
    strategies = flexifed.strategy_table(runs, target)
    found = []
    if len(strategies):
        texts = flexifed.notes(strategies, target)
        found.append(StudyTable("Strategies by version", flexifed.shown(strategies), texts))
    for one in pfedmoe.protocols(runs):
        cells = pfedmoe.method_table(one, target)
        found.append(StudyTable(f"{one.title}: methods", cells, pfedmoe.notes(one)))
    return found
