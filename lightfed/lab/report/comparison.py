"""Compares runs: comparison.html, tables, and files of its figures, in a folder of their own.

Runs that differ only in the seed share a row: mean and 95 % t interval. Unfinished runs are named
and left out. `studies.figures` adds the pictures of single papers. Differences between
methods, with intervals, are those of `lightfed compare`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame, concat

from lightfed.lab.drawing.files import write_file, write_files
from lightfed.lab.drawing.marks import Figure
from lightfed.lab.drawing.markup import document
from lightfed.lab.drawing.summary import new_console, print_line, print_table
from lightfed.lab.report.figures import comparison_figures, seeds_note
from lightfed.lab.report.tables import (
    comparison_table,
    failures_text,
    pivot_table,
    rounds_text,
)
from lightfed.lab.results import text
from lightfed.lab.results.groups import common_parent, grouped, runs_of, singles
from lightfed.lab.results.run import Run, primary_metric, read
from lightfed.lab.results.text import NOTHING, is_share
from lightfed.lab.studies.figures import study_figures
from lightfed.utils.errors import require

FOLDER = "comparison"  # beside the runs
SHARED = ("n", "seed", "data", "clients", "rounds")  # said once if all rows share them
DETAILS = ["between servers", "compute", "stored / client", "time / round"]  # on the page alone
MOST_NAMED = 12  # runs in a sentence


def compare(
    runs: Sequence[Run | Path],
    *,
    output: Path | None = None,
    group: bool = True,
    target: float | None = None,
    formats: Sequence[str] = (),
    tables: Sequence[str] = (),
    notes: Sequence[str] = (),
    pivot: str | None = None,
    columns: Sequence[str] = (),
    std: bool = False,
) -> Path:
    """Write the page of a comparison, and print its table.

    Args:
        runs: two or more runs or their folders; a folder named twice counts once.
        output: the folder to write to, created if needed; by default `comparison` in the deepest
            that holds all runs.
        group: whether runs that differ only in the seed share a row.
        target: value of the metric to reach, for the table of final figures.
        formats: of files for each figure, such as `svg`.
        tables: formats of files for each table, such as `csv`.
        notes: for the page and the terminal.
        pivot: a setting, such as partition, of which each value gets a column of the table.
        columns: of metrics.csv, for the table instead of the usual ones.
        std: show sample deviations over the seeds instead of intervals.

    Returns:
        The page, comparison.html.

    Raises:
        UserError: there are fewer than two runs, a folder is not a run, the target is not a
            possible value, or the output cannot be written.
    """
    every = [run if isinstance(run, Run) else read(run) for run in runs]
    files = list({run.folder.resolve(): run for run in every}.values())
    require(len(files) > 1, "report", f"a comparison of {len(files)} run", "name two or more runs")
    # Runs of a search have other seeds and worse settings than those that are compared.
    chosen = [run for run in files if not run.of_search]
    searched = len(files) - len(chosen) if len(chosen) > 1 else 0
    files = chosen if searched else files
    finished = [run for run in files if run.finished]
    ended = finished if len(finished) > 1 else files
    rows = grouped(ended) if group else singles(ended)
    column, counted = common_metric(ended), runs_of(rows)
    if target is not None:
        share, fix = is_share(column), "give an accuracy in 0..1, such as 0.8"
        fits = 0 < target <= 1 if share else math.isfinite(target)
        require(fits, "--target", f"{target:g}", fix if share else "give a finite number")
    for name in columns:
        known = any(run.has(name) for run in ended)
        require(known, "--columns", f"no run has {name}", "name columns of metrics.csv")
    if pivot is not None:
        finals = pivot_table(rows, columns or [column], pivot, std=std)
    else:
        finals = comparison_table(rows, column, target=target, columns=columns, std=std)
    alike = [name for name in SHARED if name in finals and finals[name].nunique() == 1]
    shared = ", ".join(f"{name} {finals[name][0]}" for name in alike)
    finals = finals.drop(columns=alike)
    said = [seeds_note(rows, std=std), f"all runs: {shared}" * bool(shared), *notes]
    if searched:
        said.append(f"of a search, left out: {text.counted(searched, 'run')}")
    said = [*filter(None, said), *provisos(files, counted)]
    folder = common_parent(files) / FOLDER if output is None else output
    figures = [*comparison_figures(rows, column), *study_figures(counted)]
    places = [row.place for row in rows] if pivot is None else []
    title = f"Comparison of {len(counted)} runs"
    page = write_page(folder, title, finals, said, figures, places=places)
    numbers = {"comparison-table": finals}
    write_files(figures, numbers, folder, formats, tables)
    if "csv" in tables:  # a row a client and evaluation
        owners = ["run", "experiment", "method", "seed", "data"]
        tested = {
            (run.name, group.label, run.algorithm, run.seed, group.condition): run.clients
            for group in rows
            for run in group.runs
        }
        clients = concat(tested, names=owners).reset_index(owners).reset_index(drop=True)
        write_files([], {"clients": clients}, folder, (), ["csv"])
    console = new_console()
    print_table(console, finals.drop(columns=DETAILS, errors="ignore"))
    for line in said:
        print_line(console, line)
    print_line(console, f"page: {page}")
    return page


def write_page(
    folder: Path,
    name: str,
    table: DataFrame,
    notes: Sequence[str],
    figures: Sequence[Figure],
    *,
    search: DataFrame | None = None,
    places: Sequence[int] = (),
) -> Path:
    """Write comparison.html; `places` are those of the colours of the table's rows."""
    parts = {"places": places, "finals": table, "notes": notes, "search": search}
    page = document(name, template="comparison.html", figures=figures, **parts)
    write_file(folder / "comparison.html", page.encode())
    return folder / "comparison.html"


def provisos(runs: Sequence[Run], counted: Sequence[Run]) -> list[str]:
    """Notes that name the runs that no row counts, and those that count with a reservation."""
    said: dict[str, list[str]] = {}
    for run in runs:
        name, out, failed = run.folder.name, run not in counted, failures_text(run)
        rounds = f" ({rounds_text(run)} rounds)"
        for what, applies, detail in (
            ("not finished" + ", left out" * out, not run.finished, rounds),
            ("of a seed that counts already, left out", out and run.finished, ""),
            ("synthetic data", not out and run.note, ""),
            ("sessions left out", not out and failed != NOTHING, f" ({failed})"),
            ("other settings in some rounds", not out and run.environment.get("reconfigured"), ""),
        ):
            if applies:
                said.setdefault(what, []).append(name + detail)
    return [
        f"{what}: {', '.join(names) if len(names) <= MOST_NAMED else f'{len(names)} runs'}"
        for what, names in said.items()
    ]


def common_metric(runs: Sequence[Run]) -> str:
    """The first run's primary metric that all runs measured, else that of the first run."""
    candidates = [*(primary_metric(run) for run in runs), "train_loss"]
    shared = [name for name in candidates if all(run.has(name) for run in runs)]
    return (shared or candidates)[0]
