"""The page of a comparison: comparison.html, its tables, and files of its figures.

`compare` makes it from run folders, `show` from the runs of a contest. Runs that differ only in the
seed are one experiment and share a row, with the mean and its 95 % t interval. Experiments on equal
terms that share seeds get a verdict. Unfinished runs are named and skipped. `studies.figures` adds
the pictures of single papers.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from lightfed.lab.results import holm, text
from lightfed.lab.results.groups import (
    Group,
    common_parent,
    grouped,
    options,
    runs_of,
    short_names,
    singles,
)
from lightfed.lab.results.run import Run, primary_metric, read
from lightfed.lab.results.text import NOTHING, is_share
from lightfed.lab.results.verdicts import (
    Row,
    Target,
    answer_line,
    answer_of,
    difference_table,
    direction_of,
    goal_of,
    p_of,
    pairs_of,
    rows_of,
)
from lightfed.lab.studies.figures import study_figures
from lightfed.utils.errors import UserError
from lightfed.utils.record import version_of

FOLDER = "comparison"  # beside the runs

# Columns that are replaced by one sentence if all rows have the same value.
SHARED = ("n", "seed", "data", "clients", "rounds")

# Columns that only the page has.
DETAILS = ["between servers", "compute", "stored / client", "time / round"]

# A sentence names at most so many runs or settings, and so many versions.
MOST_NAMED = 12
_MOST_VERSIONS = 4

_METHOD = re.compile(r"model\.algorithm(\.class_path)?$")


class Files(NamedTuple):
    """Which files to write besides the page.

    Attributes:
        formats: The formats of figures.
        tables: The formats of tables.
    """

    formats: Sequence[str] = ()
    tables: Sequence[str] = ()


class Chosen(NamedTuple):
    """The runs that a comparison counts.

    Attributes:
        files: All runs, each once, without those of a search.
        ended: The finished ones, or all if fewer than two are finished.
        searched: The number of runs of a search, which are skipped.
    """

    files: list[Run]
    ended: list[Run]
    searched: int

    @classmethod
    def of(cls, runs: Sequence[Run | Path]) -> Chosen:
        """Return the runs to count, among some runs or their folders.

        Raises:
            UserError: There are fewer than two, or a folder is not a run.
        """
        run_of_folder = {}
        for item in runs:
            run = item if isinstance(item, Run) else read(item)
            run_of_folder[run.folder.resolve()] = run
        all_runs = list(run_of_folder.values())
        if len(all_runs) < 2:
            found = f"a comparison of {text.counted(len(all_runs), 'run')}"
            raise UserError("compare", found, fix="name two or more runs")

        # Runs of a search have other seeds and worse settings than those that are compared.
        files = [run for run in all_runs if not run.of_search]
        if len(files) < 2:
            files = all_runs

        finished = [run for run in files if run.finished]
        ended = finished if len(finished) > 1 else files
        return cls(files, ended, searched=len(all_runs) - len(files))


def compare(
    runs: Sequence[Run | Path],
    *,
    output: Path | None = None,
    group: bool = True,
    metric: str | None = None,
    target: float | Target | None = None,
    formats: Sequence[str] = (),
    tables: Sequence[str] = (),
    notes: Sequence[str] = (),
    pivot: str | None = None,
    columns: Sequence[str] = (),
    std: bool = False,
    differ: Sequence[str] = (),
) -> Path:
    """Write the page of a comparison, and print its tables and verdicts.

    Args:
        runs: Two or more runs or their folders. A folder that is named twice counts once.
        output: The folder to write to, which is made if needed. By default it is `comparison` in
            the deepest folder that holds all runs.
        group: Whether runs that differ only in the seed share a row.
        metric: The column of metrics.csv that verdicts and figures are about; by default the first
            one that all runs measured.
        target: A value of the metric, or another column and its value. The costs until it is
            reached are compared as well.
        formats: The formats of files for each figure, such as `svg`.
        tables: The formats of files for each table, such as `csv`.
        notes: Notes for the page and the terminal.
        pivot: A setting, such as partition. Each of its values gets a column of the table.
        columns: Columns of metrics.csv, for the table instead of the usual ones.
        std: Whether to show sample deviations over the seeds instead of intervals.
        differ: Keys in which experiments may differ and still get a verdict, though they decide
            what is measured.

    Returns:
        The page, comparison.html.

    Raises:
        UserError: There are fewer than two runs, a folder is not a run, no run has the metric, the
            target is not a possible value, or the output cannot be written.
    """
    chosen = Chosen.of(runs)
    ended = chosen.ended
    column = metric_of(ended, metric)
    goal = target_of(target, column, ended)
    for name in columns:
        if not any(run.has(name) for run in ended):
            fix = "name columns of metrics.csv"
            raise UserError("--columns", found=f"no run has {name}", fix=fix)

    # The table of final values has a row for each experiment, or for each run.
    experiments = grouped(ended)
    rows = experiments if group else singles(ended)
    counted = runs_of(rows)
    if pivot is not None:
        finals = pivot_table(rows, columns or [column], pivot, std=std)
    else:
        goal_column, goal_value = ("", None) if goal is None else goal
        finals = comparison_table(
            rows, column, target=goal_value, of_target=goal_column, columns=columns, std=std
        )

    shared = [name for name in SHARED if name in finals and finals[name].nunique() == 1]
    shared_values = ", ".join(f"{name} {finals[name][0]}" for name in shared)
    finals = finals.drop(columns=shared)

    # Experiments that can be compared get a verdict. For a single pair, there are also all of its
    # differences.
    pairs = pairs_of(experiments, differ)
    answers, correction = _answers(pairs.pairs, column)
    answers += pairs.alone
    differences = None
    settings = []
    if len(pairs.pairs) == 1:
        a, b = pairs.pairs[0]
        # The whole experiments: a pair has only the runs of shared seeds, and perhaps none. Labels
        # alone can be equal for different data.
        names = [(group.label, group.condition) for group in (a, b)]
        first, second = [one for one in experiments if (one.label, one.condition) in names]
        settings = differing_settings(first, second)
        if a.runs:
            differences = difference_table(rows_of(a, b, goal), short_names(first, second))

    all_notes = []
    if seeds_note(rows, std=std):
        all_notes.append(seeds_note(rows, std=std))
    if shared_values:
        all_notes.append(f"all runs: {shared_values}")
    all_notes += settings
    all_notes += correction
    all_notes += pairs.differ
    all_notes += [note for note in notes if note]
    all_notes += versions_of(chosen.files)
    if chosen.searched:
        all_notes.append(f"skipped {text.counted(chosen.searched, 'run')} of a search")
    all_notes += provisos(chosen.files, counted)

    folder = common_parent(chosen.files) / FOLDER if output is None else output
    figures = [*comparison_figures(rows, column), *study_figures(counted)]
    page = write_page(
        folder,
        f"Comparison of {len(counted)} runs",
        finals,
        all_notes,
        figures,
        answers=answers,
        differences=differences,
        places=[row.place for row in rows] if pivot is None else [],
    )
    tables_by_name = {"comparison-table": finals}
    if differences is not None:
        tables_by_name["comparison-differences"] = differences
    write_files(figures, tables_by_name, folder, formats, tables)
    if "csv" in tables:
        write_files([], {"clients": clients_table(rows)}, folder, (), ["csv"])

    console = new_console()
    print_table(console, finals.drop(columns=DETAILS, errors="ignore"))
    if differences is not None:
        print_table(console, differences)
    for line in [*all_notes, *answers, f"page: {page}"]:
        print_line(console, line)
    return page


def _answers(pairs: Sequence[tuple[Group, Group]], metric: str) -> tuple[list[str], list[str]]:
    """Return the verdicts on pairs, corrected together, and a note on the correction.

    Pairs with fewer than two seeds in common have no verdict, and do not count.
    """
    with_verdict = [place for place, (a, _) in enumerate(pairs) if len(a.runs) > 1]
    corrected: dict[int, float] = {}
    if len(with_verdict) > 1:
        p_values = [p_of(*pairs[place], metric) for place in with_verdict]
        corrected = dict(zip(with_verdict, holm.corrected(p_values), strict=True))

    # The same methods may have been compared on several data.
    on_several_data = len({a.condition for a, _ in pairs}) > 1
    answers = []
    for place, (a, b) in enumerate(pairs):
        line = answer_line(a, b, metric, p=corrected.get(place))
        answers.append(f"{a.condition}: {line}" if on_several_data else line)
    return answers, holm.said(len(with_verdict))


def numbers(
    runs: Sequence[Run | Path],
    *,
    metric: str | None = None,
    target: float | Target | None = None,
    differ: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the comparison of two experiments for a program; see `pair_numbers`.

    Args:
        runs: The runs of both experiments, or their folders.
        metric: The column of the verdict; by default the first one that all runs measured.
        target: A value of the metric, or another column and its value.
        differ: Keys in which the experiments may differ, though they decide what is measured.

    Raises:
        UserError: The runs are not of two experiments on equal terms with a seed in common.
    """
    ended = Chosen.of(runs).ended
    column = metric_of(ended, metric)
    goal = target_of(target, column, ended)

    experiments = grouped(ended)
    if len(experiments) != 2:
        raise UserError(
            key="--json",
            found=f"runs of {text.counted(len(experiments), 'experiment')}",
            fix="name the runs of two experiments, which differ in more than the seed",
        )

    pairs = pairs_of(experiments, differ)
    if not pairs.pairs:
        raise UserError("--json", found=pairs.alone[0], fix="name runs on equal terms")

    a, b = pairs.pairs[0]
    if not a.runs:
        fix = "name finished runs of the same seeds"
        raise UserError("--json", found=answer_line(a, b, column), fix=fix)

    folders = [shlex.join(str(run.folder) for run in group.runs) for group in (a, b)]
    return pair_numbers(a, b, folders, column, goal, differ=pairs.differ)


def pair_numbers(
    a: Group,
    b: Group,
    named: Sequence[str],
    metric: str,
    target: Target | None,
    *,
    rows: Sequence[Row] | None = None,
    differ: Sequence[str] = (),
    search: DataFrame | None = None,
    trials: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return a comparison of two experiments for a program, as values for JSON.

    Args:
        a: The experiment that is compared with.
        b: The other one, with runs of the same seeds.
        named: For each, its command or its folders.
        metric: The column of the verdict.
        target: The column and the value until which costs are compared.
        rows: The metrics and costs, if they are known already.
        differ: The permitted differences in words.
        search: How settings were searched.
        trials: Every trial of the search, as values for JSON.
    """
    difference, answer = answer_of(a, b, metric)
    p = p_of(a, b, metric)
    # Without the value of a seed, the others are not what was asked about.
    gain, deterioration = (None, None)
    if math.isfinite(p):
        gain, deterioration = difference.excluded(direction_of(metric))
    if rows is None:
        rows = rows_of(a, b, target)
    return {
        "a": named[0],
        "b": named[1],
        "names": {"a": a.name, "b": b.name},
        "seeds": [run.seed for run in a.runs],
        "metric": metric,
        "target": None if target is None else {"metric": target[0], "value": target[1]},
        "verdict": answer,
        "p": p if math.isfinite(p) else None,
        "excluded": {"gain": gain, "deterioration": deterioration},
        "sequential": None,
        "seeds_needed": difference.seeds_needed(),
        "rows": {row.name: row.values for row in rows},
        "differ": list(differ),
        "search": [] if search is None else search.to_dict("records"),
        "trials": list(trials),
        "commit": a.runs[0].environment.get("commit"),
    }


def show(
    place: Path,
    title: str,
    groups: Sequence[Group],
    metric: str,
    table: DataFrame,
    said: Sequence[str],
    answers: Sequence[str],
    *,
    target: Target | None = None,
    search: DataFrame | None = None,
    files: Files = Files(),  # noqa: B008
    claims: DataFrame | None = None,
) -> None:
    """Print the table and the answers of a contest, and write them to a page.

    Args:
        place: The folder to write to.
        title: The title of the page, before the metric.
        groups: The runs of each method.
        metric: The column of the figures.
        table: What is compared.
        said: Notes on how it is compared.
        answers: The verdicts.
        target: The column and the value until which the table has costs.
        search: How settings were searched; an empty table without a search.
        files: Which files to write besides the page.
        claims: The verdicts as a table, which is one of these files; the page has the answers.
    """
    if search is not None and search.empty:
        search = None

    console = new_console()
    for line in said:
        print_line(console, line)
    if search is not None:
        print_table(console, search)
    print_table(console, table)
    for line in answers:
        print_line(console, line)

    name = f"{title}: {metric}"
    if target is not None:
        name += f", to {goal_of(target)}"
    figures = comparison_figures(groups, metric)
    page = write_page(place, name, table, said, figures, answers=answers, search=search)
    tables = {"comparison-table": table}
    if search is not None:
        tables["search"] = search
    if claims is not None and not claims.empty:
        tables["claims"] = claims
    write_files(figures, tables, place, *files)
    print_line(console, f"page: {page}")


def write_page(
    folder: Path,
    name: str,
    table: DataFrame,
    notes: Sequence[str],
    figures: Sequence[Figure],
    *,
    answers: Sequence[str] = (),
    differences: DataFrame | None = None,
    search: DataFrame | None = None,
    places: Sequence[int] = (),
) -> Path:
    """Write the page of a comparison.

    Args:
        folder: The folder to write to.
        name: The title of the page.
        table: The final values.
        notes: Notes on how they were compared.
        figures: The figures.
        answers: The verdicts.
        differences: The differences of a single pair.
        search: How settings were searched.
        places: The places of the colors of the table's rows.

    Returns:
        The page, comparison.html.
    """
    page = document(
        name,
        template="comparison.html",
        figures=figures,
        places=places,
        finals=table,
        notes=notes,
        search=search,
        answers=answers,
        differences=differences,
    )
    path = folder / "comparison.html"
    write_file(path, page.encode())
    return path


def metric_of(runs: Sequence[Run], metric: str | None) -> str:
    """Return the column that a comparison is about.

    Args:
        runs: The runs that are compared.
        metric: The column that the user has named, if any.

    Raises:
        UserError: A run lacks the named column.
    """
    if metric is None:
        return common_metric(runs)
    if not all(run.has(metric) for run in runs):
        found = f"{metric}, which some runs do not have"
        raise UserError("--metric", found, fix="see metrics.csv")
    return metric


def target_of(target: float | Target | None, metric: str, runs: Sequence[Run]) -> Target | None:
    """Return the column and the value to reach.

    Args:
        target: The value, or a column and its value; None for no target.
        metric: The column if only a value is given.
        runs: The runs that are compared.

    Raises:
        UserError: The value is not possible, or a run lacks the column.
    """
    if target is None:
        return None

    column, value = target if isinstance(target, tuple) else (metric, target)
    check_target(column, value)
    if not all(run.has(column) for run in runs):
        found = f"{column}, which some runs do not have"
        raise UserError("--target", found, fix="see metrics.csv")
    return column, value


def check_target(column: str, value: float) -> None:
    """Check that a column can have a value.

    Raises:
        UserError: It cannot.
    """
    if is_share(column):
        if not 0 < value <= 1:
            fix = "give an accuracy in 0..1, such as 0.8"
            raise UserError("--target", found=f"{value:g}", fix=fix)
    elif not math.isfinite(value):
        raise UserError("--target", found=f"{value:g}", fix="give a finite number")


def differing_settings(a: Group, b: Group) -> list[str]:
    """Return a note on the settings in which two experiments differ besides the method.

    It is empty if they differ in none.
    """
    settings_a = options(a.runs[0].settings, but=_METHOD)
    settings_b = options(b.runs[0].settings, but=_METHOD)

    differences = []
    for name in dict.fromkeys([*settings_a, *settings_b]):
        value_a = settings_a.get(name, "not set")
        value_b = settings_b.get(name, "not set")
        if value_a != value_b:
            differences.append(f"{name} {value_a} and {value_b}")
    if not differences:
        return []

    what = "settings that differ"
    if a.algorithm != b.algorithm:
        what = f"{a.algorithm} and {b.algorithm} differ in"
    note = f"{what}: {'; '.join(differences[:MOST_NAMED])}"
    if len(differences) > MOST_NAMED:
        note += f" and {len(differences) - MOST_NAMED} more"
    return [note]


def clients_table(rows: Sequence[Group]) -> DataFrame:
    """Return a table with a row for each client and evaluation of all runs.

    Its first columns say which run a row is of.
    """
    clients_of_run = {}
    for group in rows:
        for run in group.runs:
            key = (run.name, group.label, run.algorithm, run.seed, group.condition)
            clients_of_run[key] = run.clients

    heads = ["run", "experiment", "method", "seed", "data"]
    return concat(clients_of_run, names=heads).reset_index(heads).reset_index(drop=True)


def versions_of(runs: Sequence[Run]) -> list[str]:
    """Return a note on the versions of lightfed that wrote these runs; empty if it is one."""
    runs_of_version = Counter(version_of(run.environment) for run in runs)
    if len(runs_of_version) < 2:
        return []

    parts = []
    for version, number in runs_of_version.most_common(_MOST_VERSIONS):
        parts.append(f"{version}: {text.counted(number, 'run')}")
    if len(runs_of_version) > _MOST_VERSIONS:
        parts.append(f"and {len(runs_of_version) - _MOST_VERSIONS} more")
    return [f"written by several versions: {', '.join(parts)}"]


def provisos(runs: Sequence[Run], counted: Sequence[Run]) -> list[str]:
    """Return notes on runs that no row counts, and on those that count with a reservation.

    Args:
        runs: All runs.
        counted: The runs that rows count.
    """
    names_of_note: dict[str, list[str]] = {}

    def add(note: str, run: Run, detail: str = "") -> None:
        names_of_note.setdefault(note, []).append(f"{run.folder.name}{detail}")

    for run in runs:
        is_counted = run in counted
        if not run.finished:
            note = "not finished" if is_counted else "skipped because they are not finished"
            add(note, run, f" ({rounds_text(run)} rounds)")
        elif not is_counted:
            add("skipped because another run with the same seed is included", run)

        if is_counted:
            if run.note:
                add("synthetic data", run)
            failures = failures_text(run)
            if failures != NOTHING:
                add("sessions skipped", run, f" ({failures})")
            if run.environment.get("reconfigured"):
                add("other settings in some rounds", run)

    notes = []
    for note, names in names_of_note.items():
        listed = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} runs"
        notes.append(f"{note}: {listed}")
    return notes


def common_metric(runs: Sequence[Run]) -> str:
    """Return the first primary metric that all runs measured, or else that of the first run."""
    candidates = [primary_metric(run) for run in runs]
    candidates.append("train_loss")
    for candidate in candidates:
        if all(run.has(candidate) for run in runs):
            return candidate
    return candidates[0]
