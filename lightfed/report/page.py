"""The page of a run: index.html and its pictures, written into the run's folder."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightfed.drawing.image import Image, render
from lightfed.drawing.markup import (
    cards,
    document,
    folded,
    heading,
    pairs,
    paragraph,
    picture,
    preformatted,
    table,
    title,
    write_file,
)
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
    body = [
        title(run.name),
        paragraph(headline(run, outcome), kind="lead"),
        *(paragraph(text, kind="note") for text in _notes(run, outcome)),
        cards([*key_figures(outcome), *similarity_figures(run)]),
        *_pictures(images),
        *_cohorts(run, outcome),
        heading("Last rounds"),
        table(rounds_table(run, newest=ROUNDS_SHOWN)),
        *_setup(run),
    ]
    return document(run.name, body)


def _notes(run: RunFiles, outcome: Outcome) -> list[str]:
    """What a reader must know before the figures."""
    notes = []
    if run.synthetic:
        notes.append("Synthetic data: these figures say nothing about the data set it stands for.")
    if not outcome.finished:
        notes.append(f"Not finished: {rounds_text(outcome)} rounds at the time of writing.")
    if text := measured(run, outcome):
        notes.append(text)
    return notes


def _pictures(images: Mapping[str, Image | None]) -> list[str]:
    parts = []
    for kind in PICTURES:
        image = images[kind.file]
        if image is not None:
            parts.append(heading(kind.heading))
            parts.append(picture(image, alt=kind.heading, caption=kind.caption))
        elif kind.missing is not None:
            parts.append(heading(kind.heading))
            parts.append(paragraph(kind.missing, kind="note"))
    return parts


def _cohorts(run: RunFiles, outcome: Outcome) -> list[str]:
    if not outcome.cohorts:
        return []
    dots = [run.cohorts.index(cohort.name) for cohort in outcome.cohorts]
    return [heading("Cohorts"), table(cohort_table(outcome), dots=dots)]


def _setup(run: RunFiles) -> list[str]:
    parts = [heading("Set-up")]
    if run.config is None:
        parts.append(paragraph("The run left no config.yaml.", kind="note"))
    else:
        parts.append(folded("Configuration", preformatted(run.config)))
    if run.environment:
        parts.append(folded("Environment", pairs(flattened(run.environment))))
    return parts


def flattened(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`{"a": {"b": 1}}` -> `[("a.b", "1")]`; what is not text is written as JSON."""
    items = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            items += [(f"{key}.{name}", text) for name, text in flattened(value)]
        else:
            items.append((key, value if isinstance(value, str) else json.dumps(value)))
    return items
