"""The list of the runs in a folder: index.html beside them."""

import contextlib
import json
from datetime import datetime
from typing import Any

from lightfed.drawing.files import write_file
from lightfed.drawing.markup import document
from lightfed.results.outcome import primary_metric
from lightfed.results.run import Run, read
from lightfed.results.tables import readable, rounds_text, text_table
from lightfed.results.units import metric_text
from lightfed.utils.errors import UserError

PAGE = "index.html"
KNOWN = ".index.json"  # the rows, so that runs that have not changed are not read again


def write_index(run: Run, *, live: bool) -> None:
    """Write the list of all runs beside `run`, which is going on if `live`.

    An index.html that something else has written stays, and so does a folder that is read-only.
    """
    folder = run.folder.absolute().parent
    known = folder / KNOWN
    if (folder / PAGE).exists() and not known.is_file():
        return
    rows: dict[str, Any] = json.loads(known.read_text("utf-8")) if known.is_file() else {}
    found = {}
    for metrics in folder.glob("*/metrics.csv"):
        name, state = metrics.parent.name, metrics.stat().st_mtime
        if name == run.folder.absolute().name:
            found[name] = _row(run, state, live=live)
        elif name in rows and rows[name]["time"] == state:
            found[name] = rows[name]
        else:
            with contextlib.suppress(UserError):  # no finished round yet, or damaged
                found[name] = _row(read(metrics.parent), state, live=False)
    newest = sorted(found, key=lambda name: found[name]["time"], reverse=True)
    shown = text_table([found[name]["cells"] for name in newest])
    links = [f"{name}/{PAGE}" * (folder / name / PAGE).is_file() for name in newest]
    with contextlib.suppress(UserError):
        write_file(known, json.dumps(found).encode())
        page = document(f"Runs in {folder.name}", template="index.html", runs=shown, links=links)
        write_file(folder / PAGE, page.encode())


def _row(run: Run, time: float, *, live: bool) -> dict[str, Any]:
    column = primary_metric(run)
    cells = {
        "run": run.folder.absolute().name,
        "algorithm": run.algorithm,
        "data": f"{run.data}{run.note}",
        "seed": str(run.seed),
        "rounds": rounds_text(run),
        "final figure": f"{metric_text(column, run.final(column))} {readable(column)}",
        "state": "running" if live else "finished" if run.finished else "not finished",
        "changed": f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M}",
    }
    return {"time": time, "cells": cells}
