"""Compares runs: comparison.html, tables, and files of its figures, in a folder of their own.

Runs that differ only in the seed share a row: mean and 95 % t interval. Unfinished runs are named
and left out. `studies.figures` adds the pictures and tables of single papers. Experiments on the
same data are compared seed by seed, all pairs in comparison-verdicts.csv.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pandas import DataFrame, concat

from lightfed.drawing.charts import Figure
from lightfed.drawing.files import write_figures, write_file, write_table
from lightfed.drawing.markup import document
from lightfed.drawing.summary import new_console, print_line, print_table
from lightfed.report.comparison_figures import comparison_figures, seeds_note
from lightfed.report.final_figures import comparison_table
from lightfed.report.verdicts import NOTE, Contest, contests, verdicts_csv
from lightfed.results.groups import (
    Group,
    common_parent,
    data_terms,
    grouped,
    runs_of,
    singles,
    terms_of,
)
from lightfed.results.intervals import CHOSEN
from lightfed.results.outcome import primary_metric
from lightfed.results.run import Run, read
from lightfed.results.tables import failures_text, rounds_text
from lightfed.results.units import NOTHING, is_share
from lightfed.studies.figures import study_figures, study_tables
from lightfed.studies.shared import StudyTable
from lightfed.utils.errors import UserError

FOLDER = "comparison"  # of its output, beside the runs
PAGE = "comparison.html"
SETTINGS = ("seed", "algorithm", "data", "clients", "rounds", "n")  # said once if all share them
SPARE = (
    *("train loss", "time / round", "between servers", "stored / client", "compute"),
    *("rounds", "algorithm", "seed", "worst 10 %"),
)
SAID = re.compile(r"^clients |^max_epochs$| digest$")  # settings that other words tell
MOST_NAMED = 12  # runs in a sentence
VERDICTS = "comparison-verdicts.csv"


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    `finals` has a row for each of `rows`, and `settings` the keys in which they differ; neither has
    what all share. `contests` are seed by seed. `notes` say what intervals are of, what all runs
    share, and which are left out.
    """

    rows: Sequence[Group]
    finals: DataFrame
    settings: DataFrame
    studies: Sequence[StudyTable]
    contests: Sequence[Contest]
    notes: Sequence[str]

    @property
    def runs(self) -> list[Run]:
        return runs_of(self.rows)


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
    if len(files) < 2:
        raise UserError("report", f"a comparison of {len(files)} run", "name two or more runs")
    finished = [run for run in files if run.finished]
    ended = finished if len(finished) > 1 else files
    rows = grouped(ended) if group else singles(ended)
    column = common_metric(ended)
    _check_target(target, column)
    finals, settings, shared = _tables(rows, column, target)
    common = [seeds_note(rows), f"all runs: {shared}" if shared else ""]
    found = Comparison(
        rows=rows,
        finals=finals,
        settings=settings,
        studies=study_tables(ended, target=target),
        contests=contests(ended),
        notes=[*filter(None, common), *notes, *provisos(files, runs_of(rows))],
    )
    folder = common_parent(files) / FOLDER if output is None else output
    figures = [*comparison_figures(rows, column), *study_figures(runs_of(rows))]
    page = _write(found, figures, folder, formats, tables)
    _print(found)
    print_line(new_console(), f"page: {page}")
    return page


def _tables(
    rows: Sequence[Group], column: str, target: float | None
) -> tuple[DataFrame, DataFrame, str]:
    """Final figures and settings, each without what all rows share, and a text of that."""
    finals = comparison_table(rows, column, target=target)
    terms = [{**data_terms(row), **terms_of(row)} for row in rows]
    settings = DataFrame(terms, index=[row.label for row in rows]).fillna(NOTHING)
    settings = settings.drop(columns=[*SETTINGS], errors="ignore")
    alike = [name for name in finals if name in SETTINGS and finals[name].nunique() == 1]
    same = [name for name in settings if settings[name].nunique() == 1]
    first = {**finals[alike].iloc[0], **settings[same].iloc[0]}
    said = [f"{k} {v}" for k, v in first.items() if v != NOTHING and not SAID.search(str(k))]
    differ = settings.drop(columns=same).reset_index(names="settings of")
    return finals.drop(columns=alike), differ, ", ".join(said)


def provisos(runs: Sequence[Run], counted: Sequence[Run]) -> list[str]:
    """Notes that name the runs that no row counts, and those that count with a reservation."""
    said: dict[str, list[str]] = {}
    for run in runs:
        name, out = run.folder.name, run not in counted
        if not run.finished:
            what = f"not finished{', left out' * out}"
            said.setdefault(what, []).append(f"{name} ({rounds_text(run)} rounds)")
        elif out:
            said.setdefault("of a seed that counts already, left out", []).append(name)
        if not out and run.synthetic:
            said.setdefault("synthetic data", []).append(name)
        if not out and (failed := failures_text(run)) != NOTHING:
            said.setdefault("sessions left out", []).append(f"{name} ({failed})")
        if not out and run.environment.get("reconfigured"):
            said.setdefault("other settings in some rounds", []).append(name)
    return [
        f"{what}: {', '.join(names) if len(names) <= MOST_NAMED else f'{len(names)} runs'}"
        for what, names in said.items()
    ]


def common_metric(runs: Sequence[Run]) -> str:
    """The first run's primary metric that all runs measured, else that of the first run."""
    candidates = [*(primary_metric(run) for run in runs), "train_loss"]
    shared = [name for name in candidates if all(run.has(name) for run in runs)]
    return (shared or candidates)[0]


def clients_of(groups: Sequence[Group]) -> DataFrame:
    """The clients of all evaluations of all runs, a row a client and evaluation.

    Columns: `run`, `experiment`, `method`, `seed`, `data` and those of clients.csv.
    """
    about, tables = [], []
    for group in groups:
        for run in group.runs:
            if len(run.clients):
                about.append((run.name, group.label, run.algorithm, run.seed, group.condition))
                tables.append(run.clients)
    if not tables:
        return DataFrame()
    names = ["run", "experiment", "method", "seed", "data", ""]
    return concat(tables, keys=about, names=names).droplevel("").reset_index()


def _check_target(target: float | None, column: str) -> None:
    share = is_share(column)
    if target is not None and (not math.isfinite(target) or (share and not 0 < target <= 1)):
        fix = "give an accuracy in 0..1, such as 0.8" if share else "give a finite number"
        raise UserError("--target", f"{target:g}", fix)


def _write(
    found: Comparison,
    figures: Sequence[Figure],
    folder: Path,
    formats: Sequence[str],
    tables: Sequence[str],
) -> Path:
    page = folder / PAGE
    text = document(
        f"Comparison of {len(found.runs)} runs",
        template="comparison.html",
        places=[row.place for row in found.rows],
        finals=found.finals,
        notes=[f"{note[0].upper()}{note[1:]}." for note in found.notes],
        contests=found.contests,
        contests_note=NOTE,
        figures=figures,
        studies=found.studies,
        settings=found.settings,
    )
    write_file(page, text.encode())
    if found.contests:
        write_file(folder / VERDICTS, verdicts_csv(found.contests).encode())
    else:
        (folder / VERDICTS).unlink(missing_ok=True)  # a table of other runs would now be wrong
    write_figures(figures, folder, formats)
    for table in tables:
        write_table(found.finals, folder / "comparison-table", table)
        write_table(found.settings, folder / "comparison-settings", table)
        for figure in figures:
            write_table(figure.table, folder / figure.name, table)
        for study in found.studies:
            write_table(study.cells, folder / study.name, table)
    if "csv" in tables:
        clients = clients_of(found.rows)
        write_table(clients, folder / "clients", "csv")
        write_file(folder / "clients.parquet", clients.to_parquet(index=False))
    return page


def _print(found: Comparison) -> None:
    console = new_console()
    print_table(console, found.finals, spare=SPARE)
    for note in found.notes:
        print_line(console, note)
    for contest in found.contests:
        print_line(console, f"{contest.title}: {contest.verdict()}")
    if found.contests:
        print_line(console, CHOSEN)
    for study in found.studies:
        print_line(console, study.title)
        print_table(console, study.cells, left=(0, 1))
        for note in study.notes:
            print_line(console, note)
    if len(found.settings.columns) > 1:
        print_table(console, found.settings, spare=[*found.settings.columns[:0:-1]])
