"""The list of the runs in a folder: index.html beside them."""

import contextlib
from datetime import datetime
from pathlib import Path

from lightfed.drawing.files import write_file
from lightfed.drawing.markup import document
from lightfed.results.outcome import primary_metric
from lightfed.results.run import Run, read
from lightfed.results.tables import readable, rounds_text, text_table
from lightfed.results.units import metric_text
from lightfed.utils.errors import UserError

PAGE = "index.html"
OURS = "list of lightfed runs"  # in the page


def write_index(run: Run, *, live: bool) -> None:
    """Write the list of all runs beside `run`, which is going on if `live`.

    An index.html that something else has written stays, and so does a folder that is read-only.
    """
    folder = run.folder.absolute().parent
    page = folder / PAGE
    if page.is_file() and OURS not in page.read_text("utf-8"):
        return
    found = {}
    for metrics in sorted(folder.glob("*/metrics.csv"), key=_changed, reverse=True):
        own = metrics.parent == run.folder.absolute()
        with contextlib.suppress(UserError):  # no finished round yet, or damaged
            row = _row(run if own else read(metrics.parent), live=live and own)
            found[metrics.parent.name] = row
    links = [f"{name}/{PAGE}" * (folder / name / PAGE).is_file() for name in found]
    shown = text_table(list(found.values()))
    title = f"Runs in {folder.name}"
    with contextlib.suppress(UserError):
        text = document(title, template="index.html", ours=OURS, runs=shown, links=links)
        write_file(page, text.encode())


def _row(run: Run, *, live: bool) -> dict[str, str]:
    column = primary_metric(run)
    changed = datetime.fromtimestamp(_changed(run.folder / "metrics.csv")).astimezone()
    return {
        "run": run.folder.absolute().name,
        "algorithm": run.algorithm,
        "data": f"{run.data}{run.note}",
        "seed": str(run.seed),
        "rounds": rounds_text(run),
        "final figure": f"{metric_text(column, run.final(column))} {readable(column)}",
        "state": "running" if live else "finished" if run.finished else "not finished",
        "changed": f"{changed:%Y-%m-%d %H:%M}",
    }


def _changed(path: Path) -> float:
    return path.stat().st_mtime
