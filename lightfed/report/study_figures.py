"""The figures of single papers, for the runs that are of their kind.

Those that `pictures` still draws with matplotlib move here, one by one.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from lightfed.drawing.charts import Figure
from lightfed.report.charts import charts
from lightfed.results.run import Run

Picture = tuple[str, str, str]  # heading, and data URIs of the light and the dark picture


def figures_of_run(run: Run) -> list[Figure]:
    """Of one run."""
    return []


def study_figures(runs: Sequence[Run], *, target: float | None = None) -> list[Figure]:
    """Those that apply to these runs.

    Args:
        runs: to compare.
        target: value of the metric to reach. By default, for strategies what Clustered-FL reached,
            and for the costs of methods what all of them reached.
    """
    return []


def pictures_of_run(run: Run) -> list[Picture]:
    """Of one run, as PNG."""
    from lightfed.studies.dispfl.similarity import similarity_figure
    from lightfed.studies.pfedmoe.gates import gates_figure

    named = {"Weights of the experts": gates_figure, "Labels and masks": similarity_figure}
    return _drawn((heading, partial(draw, run)) for heading, draw in named.items())


def study_pictures(runs: Sequence[Run], *, target: float | None = None) -> list[Picture]:
    """Those that apply to these runs, as PNG."""
    return _drawn((one.heading, one.draw) for one in charts(runs, target=target))


def _drawn(named: Iterable[tuple[str, Callable[..., object]]]) -> list[Picture]:
    from lightfed.drawing.style import render

    made = ((heading, render(draw)) for heading, draw in named)  # type: ignore[arg-type]
    return [(h, _uri(image.light), _uri(image.dark)) for h, image in made if image]


def _uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
