"""The page of a run: index.html, written into the run's folder."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from lightfed.drawing.charts import Figure
from lightfed.drawing.files import write_file, write_files
from lightfed.drawing.markup import document
from lightfed.drawing.summary import new_console, print_line, print_table
from lightfed.report.final_figures import key_figures
from lightfed.report.index import write_index
from lightfed.report.run_figures import run_figures
from lightfed.results.outcome import totals
from lightfed.results.run import Run, read
from lightfed.results.tables import client_group_table, headline, measured, rounds_text
from lightfed.results.units import seconds_text
from lightfed.studies.figures import figures_of_run
from lightfed.utils.keys import flat

SPARE = ("std over clients", "down / client", "compute / client", "stored / client")
FILES = "report"  # folder of figures and tables that were asked for
REFRESH = 10  # seconds after which the page of a running run loads itself
SYNTHETIC = "Synthetic data: these results say nothing about the data set that it imitates."


def build(
    run: Path, *, live: bool = False, formats: Sequence[str] = (), tables: Sequence[str] = ()
) -> Path:
    """Make the page of a run folder, finished or not, and the list of the runs beside it.

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
    figures = [*run_figures(files), *figures_of_run(files)]
    numbers = {"final": key_figures(files), "client-groups": client_group_table(files)}
    write_files(figures, numbers, run / FILES, formats, tables)
    page = run / "index.html"
    live = live and not files.finished
    write_file(page, _page(files, figures, live=live).encode())
    write_index(files, live=live)
    return page


def print_summary(run: Path) -> None:
    """Print the tables of a run folder, and the path of its page; a UserError if it is none."""
    files = read(run)
    console = new_console()
    print_line(console, f"{files.name}: {headline(files)}")
    print_table(console, key_figures(files), left=(0, 2), spare=("note",))
    if text := measured(files):
        print_line(console, text)
    if len(groups := client_group_table(files)):
        print_table(console, groups, spare=SPARE)
    page = run / "index.html"
    if page.is_file():
        print_line(console, f"page: {page}")


def _page(run: Run, figures: Sequence[Figure], *, live: bool) -> str:
    groups = client_group_table(run)
    ended = "finished" if run.finished else f"not finished: {rounds_text(run)} rounds"
    return document(
        run.name,
        template="run.html",
        refresh=REFRESH if live else 0,
        run=run,
        headline=headline(run),
        state="running" if live else ended,
        progress=_progress(run) if live else "",
        written=time.time() if live else 0,
        notes=[SYNTHETIC] * bool(run.note),
        results=key_figures(run),
        finals=f"After round {run.last_round}, on test samples of {run.data}. {measured(run)}",
        commands=_commands(run),
        figures=figures,
        client_groups=groups if len(groups) else None,
        places=[run.client_groups.index(name) for name in groups.get("group", ())],
        environment=[
            (key, value if isinstance(value, str) else json.dumps(value))
            for key, value in flat(run.environment)
            if not key.startswith("experiment.")  # the configuration again
        ],
    )


def _progress(run: Run) -> str:
    """`12 of 30 rounds, about 4.0 min left. Written at 12:30:05`."""
    rest = (run.planned or run.last_round) - run.last_round
    left = f", about {seconds_text(rest * totals(run)['per_round'])} left" if rest else ""
    return f"{rounds_text(run)} rounds{left}. Written at {datetime.now():%H:%M:%S}"


def _commands(run: Run) -> dict[str, str]:
    """What resumes the run and what compares it, in the folder that holds the one of the runs."""
    place = run.folder.absolute()
    runs, name = shlex.quote(place.parent.name), shlex.quote(place.name)
    return {
        "Resume": f"lightfed fit --config {runs}/{name}/config.yaml --ckpt_path last",
        "Compare": f"lightfed report {runs}/{name} {runs}/OTHER",
    }
