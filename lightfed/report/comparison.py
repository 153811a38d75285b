"""Compares runs: comparison.html, tables, and files of its figures, in a folder of their own.

Runs that differ only in the seed share a row: mean and 95 % t interval. Unfinished runs are named
and left out. `studies.figures` adds the pictures and tables of single papers. Experiments on the
same data are compared seed by seed, all pairs in comparison-verdicts.csv.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame, concat

from lightfed.drawing.files import write_file, write_files
from lightfed.drawing.markup import document
from lightfed.drawing.summary import new_console, print_line, print_table
from lightfed.report.comparison_figures import comparison_figures, seeds_note
from lightfed.report.final_figures import comparison_table
from lightfed.report.verdicts import contests, verdicts_csv
from lightfed.results import groups
from lightfed.results.groups import Group, runs_of
from lightfed.results.intervals import CHOSEN
from lightfed.results.outcome import primary_metric
from lightfed.results.run import Run, read
from lightfed.results.tables import failures_text, rounds_text
from lightfed.results.units import NOTHING, is_share
from lightfed.studies.figures import study_figures, study_tables
from lightfed.utils.errors import require

FOLDER = "comparison"  # of its output, beside the runs
PAGE, VERDICTS = "comparison.html", "comparison-verdicts.csv"
SETTINGS = ("seed", "algorithm", "data", "clients", "rounds", "n")  # said once if all share them
SPARE = (
    *("train loss", "time / round", "between servers", "stored / client", "compute"),
    *("rounds", "algorithm", "seed", "worst 10 %"),
)
SAID = re.compile(r"^clients |^max_epochs$| digest$")  # settings that other words tell
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
) -> Path:
    """Write the page of a comparison, and print its table.

    Args:
        runs: two or more runs or their folders; a folder named twice counts once.
        output: the folder to write to, created if needed; by default `comparison` in the deepest
            that holds all runs.
        group: whether runs that differ only in the seed share a row.
        target: value of the metric to reach, for the table of final figures and `study_tables`.
        formats: of files for each figure, such as `svg`.
        tables: formats of files for each table, such as `csv`.
        notes: for the page and the terminal.

    Returns:
        The page, comparison.html.

    Raises:
        UserError: there are fewer than two runs, a folder is not a run, the target is not a
            possible value, or the output cannot be written.
    """
    every = [run if isinstance(run, Run) else read(run) for run in runs]
    files = list({run.folder.resolve(): run for run in every}.values())
    require(len(files) > 1, "report", f"a comparison of {len(files)} run", "name two or more runs")
    finished = [run for run in files if run.finished]
    ended = finished if len(finished) > 1 else files
    rows = groups.grouped(ended) if group else groups.singles(ended)
    column = common_metric(ended)
    _check_target(target, column)
    finals, settings, shared = _tables(rows, column, target)
    common = [seeds_note(rows), f"all runs: {shared}" if shared else ""]
    said = [*filter(None, common), *notes, *provisos(files, runs_of(rows))]
    counted, met = runs_of(rows), contests(ended)
    studies = study_tables(ended, target=target)
    figures = [*comparison_figures(rows, column), *study_figures(counted)]
    folder = groups.common_parent(files) / FOLDER if output is None else output
    page = document(
        f"Comparison of {len(counted)} runs",
        template="comparison.html",
        places=[row.place for row in rows],
        finals=finals,
        notes=[f"{note[0].upper()}{note[1:]}." for note in said],
        contests=met,
        contests_note=CHOSEN,
        figures=figures,
        studies=studies,
        settings=settings,
    )
    write_file(folder / PAGE, page.encode())
    numbers = {"comparison-table": finals, "comparison-settings": settings}
    numbers |= {study.name: study.cells for study in studies}
    write_files(figures, numbers, folder, formats, tables)
    (folder / VERDICTS).unlink(missing_ok=True)  # one of other runs would now be wrong
    if met:
        write_file(folder / VERDICTS, verdicts_csv(met).encode())
    if "csv" in tables and len(clients := clients_of(rows)):
        write_files([], {"clients": clients}, folder, (), ["csv"])
        write_file(folder / "clients.parquet", clients.to_parquet(index=False))
    console = new_console()
    print_table(console, finals, spare=SPARE)
    for line in (*said, *(f"{one.title}: {one.verdicts()[0]}" for one in met)):
        print_line(console, line)
    if met:
        print_line(console, CHOSEN)
    for study in studies:
        print_line(console, study.title)
        print_table(console, study.cells, left=(0, 1))
        for note in study.notes:
            print_line(console, note)
    if len(settings.columns) > 1:
        print_table(console, settings, spare=[*settings.columns[:0:-1]])
    print_line(console, f"page: {folder / PAGE}")
    return folder / PAGE


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


def clients_of(rows: Sequence[Group]) -> DataFrame:
    """The clients of all evaluations of all runs, a row a client and evaluation.

    Columns: `run`, `experiment`, `method`, `seed`, `data` and those of clients.csv.
    """
    tables = {
        (run.name, group.label, run.algorithm, run.seed, group.condition): run.clients
        for group in rows
        for run in group.runs
    }
    names = ["run", "experiment", "method", "seed", "data"]
    return concat(tables, names=names).reset_index(names).reset_index(drop=True)


def _tables(
    rows: Sequence[Group], column: str, target: float | None
) -> tuple[DataFrame, DataFrame, str]:
    """Final figures and settings, each without what all rows share, and a text of that."""
    finals = comparison_table(rows, column, target=target)
    terms = [{**groups.data_terms(row), **groups.terms_of(row)} for row in rows]
    settings = DataFrame(terms, index=[row.label for row in rows]).fillna(NOTHING)
    settings = settings.drop(columns=[*SETTINGS], errors="ignore")
    alike = [name for name in finals if name in SETTINGS and finals[name].nunique() == 1]
    same = [name for name in settings if settings[name].nunique() == 1]
    first = {**finals[alike].iloc[0], **settings[same].iloc[0]}
    said = [f"{k} {v}" for k, v in first.items() if v != NOTHING and not SAID.search(str(k))]
    differ = settings.drop(columns=same).reset_index(names="settings of")
    return finals.drop(columns=alike), differ, ", ".join(said)


def _check_target(target: float | None, column: str) -> None:
    share = is_share(column)
    fits = target is None or (math.isfinite(target) and (not share or 0 < target <= 1))
    fix = "give an accuracy in 0..1, such as 0.8" if share else "give a finite number"
    require(fits, "--target", f"{target:g}" if target is not None else "", fix)
