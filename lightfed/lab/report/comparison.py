"""The page of a comparison: comparison.html, its tables, and files of its figures.

`compare` makes it of run folders, `show` of the runs of a contest. Runs that differ only in the
seed are one experiment and share a row: mean and 95 % t interval. Experiments on equal terms that
share seeds get a verdict. Unfinished runs are named and left out. `studies.figures` adds the
pictures of single papers.
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
from lightfed.lab.results import text
from lightfed.lab.results.groups import Group, common_parent, grouped, options, runs_of, singles
from lightfed.lab.results.run import Run, primary_metric, read
from lightfed.lab.results.text import NOTHING, is_share
from lightfed.lab.results.verdicts import (
    Row,
    Target,
    answer_line,
    answer_of,
    difference_table,
    goal_of,
    pairs_of,
    rows_of,
)
from lightfed.lab.studies.figures import study_figures
from lightfed.utils.errors import UserError, require
from lightfed.utils.record import version_of

FOLDER = "comparison"  # beside the runs
SHARED = ("n", "seed", "data", "clients", "rounds")  # said once if all rows share them
DETAILS = ["between servers", "compute", "stored / client", "time / round"]  # on the page alone
MOST_NAMED = 12  # runs in a sentence
_METHOD = re.compile(r"model\.algorithm(\.class_path)?$")


class Files(NamedTuple):
    """Which files to write besides the page: formats of figures, and of tables."""

    formats: Sequence[str] = ()
    tables: Sequence[str] = ()


class Chosen(NamedTuple):
    """The runs that a comparison counts.

    Attributes:
        files: all runs, each once, without those of a search.
        ended: the finished ones, or all if fewer than two are finished.
        searched: number of runs of a search, which are left out.
    """

    files: list[Run]
    ended: list[Run]
    searched: int

    @classmethod
    def of(cls, runs: Sequence[Run | Path]) -> Chosen:
        """Of two or more runs or their folders; a UserError if there are fewer."""
        every = [run if isinstance(run, Run) else read(run) for run in runs]
        files = list({run.folder.resolve(): run for run in every}.values())
        found = f"a comparison of {text.counted(len(files), 'run')}"
        require(len(files) > 1, "compare", found, "name two or more runs")

        # Runs of a search have other seeds and worse settings than those that are compared.
        chosen = [run for run in files if not run.of_search]
        if len(chosen) < 2:
            chosen = files
        finished = [run for run in chosen if run.finished]
        ended = finished if len(finished) > 1 else chosen
        return cls(chosen, ended, len(files) - len(chosen))


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
        runs: two or more runs or their folders; a folder named twice counts once.
        output: the folder to write to, created if needed; by default `comparison` in the deepest
            that holds all runs.
        group: whether runs that differ only in the seed share a row.
        metric: column of metrics.csv that verdicts and figures are about; by default the first that
            all runs measured.
        target: value of the metric, or another column and its value, to reach: the costs until
            then are compared as well.
        formats: of files for each figure, such as `svg`.
        tables: formats of files for each table, such as `csv`.
        notes: for the page and the terminal.
        pivot: a setting, such as partition, of which each value gets a column of the table.
        columns: of metrics.csv, for the table instead of the usual ones.
        std: show sample deviations over the seeds instead of intervals.
        differ: keys in which experiments may differ and get a verdict, though they decide what is
            measured.

    Returns:
        The page, comparison.html.

    Raises:
        UserError: there are fewer than two runs, a folder is not a run, no run has the metric, the
            target is not a possible value, or the output cannot be written.
    """
    chosen = Chosen.of(runs)
    ended = chosen.ended
    column = metric_of(ended, metric)
    goal = target_of(target, column, ended)
    for name in columns:
        known = any(run.has(name) for run in ended)
        require(known, "--columns", f"no run has {name}", "name columns of metrics.csv")

    # The table of final figures: a row for each experiment, or for each run.
    experiments = grouped(ended)
    rows = experiments if group else singles(ended)
    counted = runs_of(rows)
    if pivot is not None:
        finals = pivot_table(rows, columns or [column], pivot, std=std)
    else:
        of_target, value = goal or ("", None)
        finals = comparison_table(
            rows, column, target=value, of_target=of_target, columns=columns, std=std
        )
    alike = [name for name in SHARED if name in finals and finals[name].nunique() == 1]
    shared = ", ".join(f"{name} {finals[name][0]}" for name in alike)
    finals = finals.drop(columns=alike)

    # Verdicts on the experiments that can be compared; for a single pair also all differences.
    found = pairs_of(experiments, differ)
    answers = [answer_line(a, b, column) for a, b in found.pairs]
    answers += found.alone
    differences = None
    settings = []
    if len(found.pairs) == 1:
        a, b = found.pairs[0]
        settings = differing_settings(
            *(one for one in experiments if one.label in (a.name, b.name))
        )
        if a.runs:
            differences = difference_table(rows_of(a, b, goal), a, b)

    said = [seeds_note(rows, std=std)]
    if shared:
        said.append(f"all runs: {shared}")
    said += [*settings, *found.differ, *notes, *versions_of(chosen.files)]
    if chosen.searched:
        said.append(f"of a search, left out: {text.counted(chosen.searched, 'run')}")
    said = [*filter(None, said), *provisos(chosen.files, counted)]

    folder = common_parent(chosen.files) / FOLDER if output is None else output
    figures = [*comparison_figures(rows, column), *study_figures(counted)]
    page = write_page(
        folder,
        f"Comparison of {len(counted)} runs",
        finals,
        said,
        figures,
        answers=answers,
        differences=differences,
        places=[row.place for row in rows] if pivot is None else [],
    )
    numbers = {"comparison-table": finals}
    if differences is not None:
        numbers["comparison-differences"] = differences
    write_files(figures, numbers, folder, formats, tables)
    if "csv" in tables:
        write_files([], {"clients": clients_table(rows)}, folder, (), ["csv"])

    console = new_console()
    print_table(console, finals.drop(columns=DETAILS, errors="ignore"))
    if differences is not None:
        print_table(console, differences)
    for line in [*said, *answers, f"page: {page}"]:
        print_line(console, line)
    return page


def numbers(
    runs: Sequence[Run | Path],
    *,
    metric: str | None = None,
    target: float | Target | None = None,
    differ: Sequence[str] = (),
) -> dict[str, Any]:
    """The comparison of two experiments for a program, see `pair_numbers`.

    Raises:
        UserError: the runs are not of two experiments on equal terms with a seed in common.
    """
    ended = Chosen.of(runs).ended
    column = metric_of(ended, metric)
    goal = target_of(target, column, ended)
    experiments = grouped(ended)
    if len(experiments) != 2:
        found = f"runs of {text.counted(len(experiments), 'experiment')}"
        raise UserError("--json", found, "name runs of two, which differ in more than the seed")

    pairs = pairs_of(experiments, differ)
    if not pairs.pairs:
        raise UserError("--json", pairs.alone[0], "name runs on equal terms")
    a, b = pairs.pairs[0]
    if not a.runs:
        raise UserError("--json", answer_line(a, b, column), "name finished runs of the same seeds")
    named = [shlex.join(str(run.folder) for run in group.runs) for group in (a, b)]
    return pair_numbers(a, b, named, column, goal, differ=pairs.differ)


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
) -> dict[str, Any]:
    """A comparison of two experiments for a program.

    Args:
        a: the experiment that is compared with.
        b: the other one, with runs of the same seeds.
        named: for each, its command or its folders.
        metric: of the verdict.
        target: of the costs until it is reached.
        rows: the metrics and costs, if they are known already.
        differ: the permitted differences in words.
        search: how settings were searched.
    """
    found, answer = answer_of(a, b, metric)
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
        "seeds_needed": found.seeds_needed(),
        "rows": {row.name: row.values for row in rows},
        "differ": list(differ),
        "search": [] if search is None else search.to_dict("records"),
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
) -> None:
    """Print the table and the answers of a contest, and write them to a page.

    Args:
        place: the folder to write to.
        title: of the page, before the metric.
        groups: the runs of each method.
        metric: of the figures.
        table: what is compared.
        said: notes on how.
        answers: the verdicts.
        target: of costs in the table.
        search: how settings were searched; an empty table without a search.
        files: which to write besides.
    """
    console = new_console()
    for line in said:
        print_line(console, line)
    if search is not None and not len(search):
        search = None
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
    """Write comparison.html; `places` are those of the colours of the table's rows."""
    parts: dict[str, Any] = {"places": places, "finals": table, "notes": notes, "search": search}
    parts |= {"answers": answers, "differences": differences}
    page = document(name, template="comparison.html", figures=figures, **parts)
    write_file(folder / "comparison.html", page.encode())
    return folder / "comparison.html"


def metric_of(runs: Sequence[Run], metric: str | None) -> str:
    """The column that a comparison is about; a UserError if it is named and a run lacks it."""
    if metric is None:
        return common_metric(runs)
    known = all(run.has(metric) for run in runs)
    require(known, "--metric", f"{metric}, which some runs do not have", "see metrics.csv")
    return metric


def target_of(target: float | Target | None, metric: str, runs: Sequence[Run]) -> Target | None:
    """The column and the value to reach.

    Raises:
        UserError: the value is not possible, or a run does not have the column.
    """
    if target is None:
        return None
    column, value = target if isinstance(target, tuple) else (metric, target)
    check_target(column, value)
    known = all(run.has(column) for run in runs)
    require(known, "--target", f"{column}, which some runs do not have", "see metrics.csv")
    return column, value


def check_target(column: str, value: float) -> None:
    """Refuse a value that a column cannot have."""
    if is_share(column):
        fits, fix = 0 < value <= 1, "give an accuracy in 0..1, such as 0.8"
    else:
        fits, fix = math.isfinite(value), "give a finite number"
    require(fits, "--target", f"{value:g}", fix)


def differing_settings(a: Group, b: Group) -> list[str]:
    """A note that says in which settings two experiments differ besides the method."""
    own, theirs = (options(group.runs[0].settings, but=_METHOD) for group in (a, b))
    found = [
        f"{name} {own.get(name, 'not set')} and {theirs.get(name, 'not set')}"
        for name in dict.fromkeys([*own, *theirs])
        if own.get(name) != theirs.get(name)
    ]
    if not found:
        return []
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return [f"{a.label} and {b.label} differ in: {'; '.join(found[:MOST_NAMED])}{more}"]


def clients_table(rows: Sequence[Group]) -> DataFrame:
    """A row for each client and evaluation of all runs, with the run that it is of."""
    owners = ["run", "experiment", "method", "seed", "data"]
    tested = {
        (run.name, group.label, run.algorithm, run.seed, group.condition): run.clients
        for group in rows
        for run in group.runs
    }
    return concat(tested, names=owners).reset_index(owners).reset_index(drop=True)


def versions_of(runs: Sequence[Run]) -> list[str]:
    """A line that names the versions of lightfed that wrote these runs, if there are several."""
    found = Counter(version_of(run.environment) for run in runs)
    if len(found) < 2:
        return []
    named = [
        f"{version}: {text.counted(number, 'run')}" for version, number in found.most_common(4)
    ]
    if len(found) > len(named):
        named.append(f"and {len(found) - len(named)} more")
    return [f"written by several versions: {', '.join(named)}"]


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
