"""The page of a run: index.html and its pictures, written into the run's folder."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightfed.drawing.image import Image, render
from lightfed.drawing.markup import document, write_file
from lightfed.report.plots import PICTURES
from lightfed.results.outcome import Outcome, outcome_of
from lightfed.results.runfiles import RunFiles, load
from lightfed.results.tables import (
    cohort_table,
    headline,
    key_figures,
    measured,
    rounds_table,
    rounds_text,
)
from lightfed.studies.dispfl.similarity import similarity_figures

ROUNDS_SHOWN = 10


def build(run: Path) -> Path:
    """Makes the pictures and the page of a run folder, finished or not.

    Returns:
        The page, `run`/index.html.

    Raises:
        UserError: the folder is not one of a run, or cannot be read or written.
    """
    files = load(run)
    images = {kind.file: render(partial(kind.draw, files)) for kind in PICTURES}
    for name, image in images.items():
        if image is None:
            (run / name).unlink(missing_ok=True)  # a picture of an earlier state would now be wrong
        else:
            write_file(run / name, image.light)
    page = run / "index.html"
    write_file(page, _page(files, outcome_of(files), images).encode())
    return page


def _page(run: RunFiles, outcome: Outcome, images: Mapping[str, Image | None]) -> str:
    return document(
        run.name,
        template="run.html",
        run=run,
        headline=headline(run, outcome),
        notes=_notes(run, outcome),
        figures=[*key_figures(outcome), *similarity_figures(run)],
        pictures=[(kind, images[kind.file]) for kind in PICTURES],
        cohorts=cohort_table(outcome),
        dots=[run.cohorts.index(cohort.name) for cohort in outcome.cohorts],
        rounds=rounds_table(run, newest=ROUNDS_SHOWN),
        environment=flattened(run.environment),
    )


def _notes(run: RunFiles, outcome: Outcome) -> list[str]:
    """What a reader must know before the figures."""
    synthetic = "Synthetic data: these figures say nothing about the data set it stands for."
    unfinished = f"Not finished: {rounds_text(outcome)} rounds at the time of writing."
    personal = measured(run, outcome)
    return [
        *([synthetic] if run.synthetic else []),
        *([] if outcome.finished else [unfinished]),
        *([personal] if personal else []),
    ]


def flattened(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`{"a": {"b": 1}}` -> `[("a.b", "1")]`; what is not text is written as JSON."""
    items = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            items += [(f"{key}.{name}", text) for name, text in flattened(value)]
        else:
            items.append((key, value if isinstance(value, str) else json.dumps(value)))
    return items
