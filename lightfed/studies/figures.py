"""All figures and tables of single papers, for the runs that are of their kind."""

from collections.abc import Sequence

from lightfed.drawing.charts import Figure
from lightfed.results.run import Run
from lightfed.studies import dispfl, fedbcd, flexifed, heterofl, pfedmoe
from lightfed.studies.shared import StudyTable


def figures_of_run(run: Run) -> list[Figure]:
    """Of one run."""
    return [*filter(None, (pfedmoe.gates_figure(run), dispfl.similarity_figure(run)))]


def study_figures(runs: Sequence[Run]) -> list[Figure]:
    """Those that apply to these runs."""
    studies = (dispfl, flexifed, pfedmoe, fedbcd, heterofl)
    return [figure for study in studies for figure in study.figures(runs)]


def study_tables(runs: Sequence[Run], *, target: float | None = None) -> list[StudyTable]:
    """FlexiFed's strategies by version, and pFedMoE and its rivals; target: of the metric."""
    return [*flexifed.tables(runs, target=target), *pfedmoe.tables(runs, target=target)]
