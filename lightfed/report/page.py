"""The page of a run: index.html and its pictures, written into the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightfed.drawing.clients import clients_figure
from lightfed.drawing.curves import curves_figure
from lightfed.drawing.heatmap import partition_figure
from lightfed.drawing.markup import document, write_file
from lightfed.drawing.style import Image, Theme, render
from lightfed.results.outcome import Outcome, outcome_of
from lightfed.results.run import Run, read
from lightfed.results.tables import (
    client_group_table,
    headline,
    key_figures,
    measured,
    rounds_table,
    rounds_text,
)
from lightfed.studies.dispfl.similarity import similarity_figure, similarity_figures
from lightfed.studies.pfedmoe.gates import gates_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS_SHOWN = 10
# by file in the run folder (light theme); a function returns None if there is nothing to show
PICTURES: dict[str, Callable[[Run, Theme], Figure | None]] = {
    "curves.png": curves_figure,
    "clients.png": clients_figure,
    "partition.png": partition_figure,
    "gate.png": gates_figure,
    "similarity.png": similarity_figure,
}


def build(run: Path) -> Path:
    """Make the pictures and the page of a run folder, finished or not.

    Returns:
        The page, `run`/index.html.

    Raises:
        UserError: the folder is not a run, or cannot be read or written.
    """
    files = read(run)
    images = {name: render(partial(draw, files)) for name, draw in PICTURES.items()}
    for name, image in images.items():
        if image is None:
            (run / name).unlink(missing_ok=True)  # a picture of an earlier state would now be wrong
        else:
            write_file(run / name, image.light)
    page = run / "index.html"
    write_file(page, _page(files, outcome_of(files), images).encode())
    return page


def _page(run: Run, outcome: Outcome, images: Mapping[str, Image | None]) -> str:
    return document(
        run.name,
        template="run.html",
        run=run,
        headline=headline(run),
        notes=_notes(run, outcome),
        figures=[*key_figures(outcome), *similarity_figures(run)],
        images=images,
        client_groups=client_group_table(outcome),
        dots=[run.client_groups.index(name) for name in outcome.client_groups.index],
        rounds=rounds_table(run, newest=ROUNDS_SHOWN),
        environment=flattened(run.environment),
    )


def _notes(run: Run, outcome: Outcome) -> list[str]:
    """What a reader must know before the numbers."""
    synthetic = "Synthetic data: these results say nothing about the data set that it imitates."
    unfinished = f"Not finished: {rounds_text(run)} rounds at the time of writing."
    personal = measured(outcome)
    return [
        *([synthetic] if run.synthetic else []),
        *([] if run.finished else [unfinished]),
        *([personal] if personal else []),
    ]


def flattened(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`{"a": {"b": 1}}` -> `[("a.b", "1")]`; values other than text become JSON."""
    items = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            items += [(f"{key}.{name}", text) for name, text in flattened(value)]
        else:
            items.append((key, value if isinstance(value, str) else json.dumps(value)))
    return items
