"""All figures of single papers, for the runs that are of their kind."""

from collections.abc import Sequence

from lightfed.lab.drawing.marks import Figure
from lightfed.lab.results.run import Run
from lightfed.lab.studies import dispfl, fedbcd, flexifed, heterofl, pfedmoe


def figures_of_run(run: Run) -> list[Figure]:
    """Of one run."""
    own = (pfedmoe.gates_figure, dispfl.similarity_figure, fedbcd.servers_figure)
    return [*filter(None, (figure(run) for figure in own))]


def study_figures(runs: Sequence[Run]) -> list[Figure]:
    """Those that apply to these runs."""
    studies = (dispfl, flexifed, pfedmoe, fedbcd, heterofl)
    return [figure for study in studies for figure in study.figures(runs)]
