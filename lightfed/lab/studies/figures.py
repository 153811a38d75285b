"""All figures of single papers, for the runs that are of their kind."""

from collections.abc import Sequence

from lightfed.lab.drawing.marks import Figure
from lightfed.lab.results.run import Run
from lightfed.lab.studies import dispfl, fedbcd, flexifed, heterofl, pfedmoe


def figures_of_run(run: Run) -> list[Figure]:
    """The figures that apply to a single run."""
    found = []
    for make in (pfedmoe.gates_figure, dispfl.similarity_figure, fedbcd.servers_figure):
        figure = make(run)
        if figure is not None:
            found.append(figure)
    return found


def study_figures(runs: Sequence[Run]) -> list[Figure]:
    """The figures that apply to these runs together."""
    found: list[Figure] = []
    for paper in (dispfl, flexifed, pfedmoe, fedbcd, heterofl):
        found += paper.figures(runs)
    return found
