"""The list of the runs in a folder: index.html beside them."""

import contextlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from lightfed.drawing.files import write_file
from lightfed.drawing.markup import document
from lightfed.results.outcome import primary_metric
from lightfed.results.run import Run, read
from lightfed.results.tables import readable, rounds_text
from lightfed.results.units import NOTHING, metric_text
from lightfed.utils.errors import UserError

PAGE = "index.html"
KNOWN = ".index.json"  # the rows, so that runs that have not changed are not read again


def write_index(run: Run, *, live: bool) -> None:
    """Write the list of all runs beside `run`, which is going on if `live`.

    An index.html that something else has written stays, and so does a folder that is read-only.
    """
    folder = run.folder.absolute().parent
    rows = _known(folder)
    if rows is None:
        return
    found = {}
    for metrics in sorted(folder.glob("*/metrics.csv")):
        name = metrics.parent.name
        files = [metrics, *metrics.parent.glob("environment.json")]
        state = max(path.stat().st_mtime for path in files)
        if name == run.folder.absolute().name:
            found[name] = _row(run, state, "running" if live else "")
        elif name in rows and rows[name]["time"] == state:
            found[name] = rows[name]
        else:
            with contextlib.suppress(UserError):  # no finished round yet, or damaged
                found[name] = _row(read(metrics.parent), state)
    newest = sorted(found, key=lambda name: found[name]["time"], reverse=True)
    shown = pd.DataFrame([found[name]["cells"] for name in newest])
    links = [f"{name}/{PAGE}" * (folder / name / PAGE).is_file() for name in newest]
    with contextlib.suppress(UserError):
        write_file(folder / KNOWN, json.dumps(found).encode())
        page = document(f"Runs in {folder.name}", template="index.html", runs=shown, links=links)
        write_file(folder / PAGE, page.encode())


def _known(folder: Path) -> dict[str, dict[str, Any]] | None:
    """The rows of the list; None if its page is of something else."""
    if not (folder / KNOWN).is_file():
        return None if (folder / PAGE).exists() else {}
    rows: dict[str, dict[str, Any]] = json.loads((folder / KNOWN).read_text("utf-8"))
    return rows


def _row(run: Run, time: float, state: str = "") -> dict[str, Any]:
    column = primary_metric(run)
    cells = {
        "run": run.folder.absolute().name,
        "algorithm": run.algorithm,
        "data": f"{run.data}{run.note}",
        "seed": NOTHING if run.seed is None else str(run.seed),
        "rounds": rounds_text(run),
        "final figure": f"{metric_text(column, run.final(column))} {readable(column)}",
        "state": state or ("finished" if run.finished else "not finished"),
        "changed": datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M"),
    }
    return {"time": time, "cells": cells}
