"""The page of a run: index.html, written into the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from lightfed.drawing.charts import Figure
from lightfed.drawing.files import write_figures, write_file, write_table
from lightfed.drawing.markup import document
from lightfed.report.run_figures import run_figures
from lightfed.results.outcome import Outcome, outcome_of
from lightfed.results.run import Run, read
from lightfed.results.tables import (
    client_group_table,
    headline,
    key_figures,
    measured,
    rounds_table,
    rounds_text,
    text_table,
)
from lightfed.results.units import time_left_text
from lightfed.studies.dispfl.similarity import similarity_figures
from lightfed.studies.figures import figures_of_run
from lightfed.utils.keys import flat

FILES = "report"  # folder of figures and tables that were asked for
ROUNDS_SHOWN = 10
REFRESH = 20  # seconds after which the page of a running run loads itself
COSTS = ("train loss", "sent", "between", "compute", "stored", "time")
ABSENT = {
    "curves": "No curves: fewer than two rounds were measured.",
    "clients": "No picture of the clients: none were evaluated individually (clients.csv).",
    "partition": "No picture of the partition: it was not recorded (partition.npz).",
}


def build(
    run: Path, *, live: bool = False, formats: Sequence[str] = (), tables: Sequence[str] = ()
) -> Path:
    """Make the page of a run folder, finished or not.

    Args:
        run: the folder.
        live: whether the run is going on: the page then loads itself again.
        formats: of files for each figure, such as `svg`.
        tables: formats of files for each table, such as `csv`.

    Returns:
        The page, `run`/index.html.

    Raises:
        UserError: the folder is not a run, or cannot be read or written.
    """
    files = read(run)
    outcome = outcome_of(files)
    figures = [*run_figures(files), *figures_of_run(files)]
    write_figures(figures, run / FILES, formats)
    for table in tables:
        rows = [{"figure": f.label, "final": f.value, "note": f.note} for f in key_figures(outcome)]
        write_table(text_table(rows), run / FILES / "final", table)
        write_table(client_group_table(outcome), run / FILES / "client-groups", table)
        for figure in figures:
            write_table(figure.table, run / FILES / figure.name, table)
    page = run / "index.html"
    write_file(page, _page(files, outcome, figures, live=live and not files.finished).encode())
    return page


def _page(run: Run, outcome: Outcome, figures: Sequence[Figure], *, live: bool) -> str:
    every = [*key_figures(outcome), *similarity_figures(run)]
    costs = [figure for figure in every if figure.label.startswith(COSTS)]
    drawn = {figure.name for figure in figures}
    groups = client_group_table(outcome)
    return document(
        run.name,
        template="run.html",
        refresh=REFRESH if live else 0,
        run=run,
        headline=headline(run),
        notes=[*([_progress(run, outcome)] if live else []), *_notes(run, outcome, live=live)],
        results=[figure for figure in every if figure not in costs],
        costs=costs,
        figures=figures,
        absent=[text for name, text in ABSENT.items() if name not in drawn],
        client_groups=groups if len(groups) else None,
        places=[run.client_groups.index(name) for name in outcome.client_groups.index],
        # a column a round: there may be thirty metrics
        rounds=rounds_table(run, newest=ROUNDS_SHOWN)
        .set_index("round")
        .T.reset_index(names="round"),
        environment=[
            (key, value if isinstance(value, str) else json.dumps(value))
            for key, value in flat(run.environment)
        ],
    )


def _progress(run: Run, outcome: Outcome) -> str:
    """`Running: 12 of 30 rounds, about 4 min left. Written at 12:30:05; ...`."""
    rest = (run.planned or run.last_round) - run.last_round
    left = f", about {time_left_text(rest * outcome.seconds_per_round)} left" if rest else ""
    now = datetime.now().astimezone().strftime("%H:%M:%S")
    again = f"Written at {now}; the page loads itself every {REFRESH} s until the run ends."
    return f"Running: {rounds_text(run)} rounds{left}. {again}"


def _notes(run: Run, outcome: Outcome, *, live: bool) -> list[str]:
    """What a reader must know before the numbers."""
    synthetic = "Synthetic data: these results say nothing about the data set that it imitates."
    unfinished = f"Not finished: {rounds_text(run)} rounds at the time of writing."
    personal = measured(outcome)
    return [
        *([synthetic] if run.synthetic else []),
        *([] if run.finished or live else [unfinished]),
        *([personal] if personal else []),
    ]
