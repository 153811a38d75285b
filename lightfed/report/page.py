"""The page of a run, index.html in its folder, and the list of the runs beside it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from lightfed.drawing.files import write_file, write_files
from lightfed.drawing.markup import document
from lightfed.drawing.summary import new_console, print_line, print_table
from lightfed.report.figures import run_figures
from lightfed.report.tables import client_group_table, headline, key_figures, measured, rounds_text
from lightfed.results.run import Run, primary_metric, read, totals
from lightfed.results.text import goal_text, seconds_text, text_table
from lightfed.studies.figures import figures_of_run
from lightfed.utils.errors import UserError
from lightfed.utils.keys import flat

PAGE = "index.html"
SPARE = ("std over clients", "down / client", "compute / client", "stored / client")
FILES = "report"  # folder of figures and tables that were asked for
REFRESH = 10  # seconds after which the page of a running run loads itself
SYNTHETIC = "Synthetic data: these results say nothing about the data set that it imitates."
OURS = "list of lightfed runs"  # in the list


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
    live = live and not files.finished
    figures, groups = [*run_figures(files), *figures_of_run(files)], client_group_table(files)
    numbers = {"final": key_figures(files), "client-groups": groups}
    write_files(figures, numbers, run / FILES, formats, tables)
    rest = (files.planned or files.last_round) - files.last_round
    left = f", about {seconds_text(rest * totals(files)['per_round'])} left" if rest else ""
    now = f"{rounds_text(files)} rounds{left}. Written at {datetime.now():%H:%M:%S}"
    personal = measured(files)
    ended = "finished" if files.finished else f"not finished: {rounds_text(files)} rounds"
    folder, name = (shlex.quote(p.name) for p in (run.absolute().parent, run.absolute()))
    page = document(
        files.name,
        template="run.html",
        refresh=REFRESH * live,
        run=files,
        headline=headline(files),
        state="running" if live else ended,
        progress=now if live else "",
        written=time.time(),
        notes=[SYNTHETIC] * bool(files.note),
        results=numbers["final"],
        finals=f"After round {files.last_round}, on test samples of {files.data}. {personal}",
        commands={
            "Resume": f"lightfed fit --config {folder}/{name}/config.yaml --ckpt_path last",
            "Compare": f"lightfed report {folder}/{name} {folder}/OTHER",
        },
        figures=figures,
        client_groups=groups,
        places=[files.client_groups.index(name) for name in groups.get("group", ())],
        environment=[
            (key, value if isinstance(value, str) else json.dumps(value))
            for key, value in flat(files.environment)
            if not key.startswith("experiment.")  # the configuration again
        ],
    )
    write_file(run / PAGE, page.encode())
    with suppress(UserError):  # the folder of the runs may be read-only
        _write_list(files, live=live)
    return run / PAGE


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
    if (run / PAGE).is_file():
        print_line(console, f"page: {run / PAGE}")


def _write_list(run: Run, *, live: bool) -> None:
    """Write the list of all runs beside one, which is going on if `live`.

    An index.html that something else has written stays.
    """
    folder = run.folder.absolute().parent
    page = folder / PAGE
    if page.is_file() and OURS not in page.read_text("utf-8"):
        return
    found = {}
    for metrics in sorted(folder.glob("*/metrics.csv"), key=_changed, reverse=True):
        own = metrics.parent == run.folder.absolute()
        with suppress(UserError):  # no finished round yet, or damaged
            found[metrics.parent.name] = _row(read(metrics.parent), live=live and own)
    links = [f"{name}/{PAGE}" * (folder / name / PAGE).is_file() for name in found]
    shown, title = text_table(list(found.values())), f"Runs in {folder.name}"
    text = document(title, template=PAGE, ours=OURS, runs=shown, links=links)
    write_file(page, text.encode())


def _row(run: Run, *, live: bool) -> dict[str, str]:
    column = primary_metric(run)
    changed = datetime.fromtimestamp(_changed(run.folder / "metrics.csv"))
    return {
        "run": run.folder.name,
        "algorithm": run.algorithm,
        "data": f"{run.data}{run.note}",
        "seed": str(run.seed),
        "rounds": rounds_text(run),
        "final figure": goal_text(column, run.final(column)),
        "state": "running" if live else "finished" if run.finished else "not finished",
        "changed": f"{changed:%Y-%m-%d %H:%M}",
    }


def _changed(path: Path) -> float:
    return path.stat().st_mtime
