"""Compares runs: comparison.png, comparison.html and a table with a row per run.

`charts` adds pictures of special studies, comparison-*.png. pFedMoE and its rivals get a table, and
so do FlexiFed's strategies, by version; the latter is also written to comparison-strategies.csv.
Experiments on the same data are compared seed by seed, all pairs in comparison-verdicts.csv.

With `group`, runs that differ only in the seed share a row: mean +- sample standard deviation.
Unfinished runs are named, and are never averaged with finished ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pandas import DataFrame

from lightfed.drawing.markup import document, write_file
from lightfed.drawing.style import Image, render
from lightfed.drawing.summary import new_console, print_line, print_table
from lightfed.drawing.versus import comparison_figure
from lightfed.report.charts import FILES, Chart, charts
from lightfed.report.final_figures import comparison_table
from lightfed.report.verdicts import (
    Contest,
    contests,
    print_verdicts,
    verdicts_csv,
    verdicts_markup,
)
from lightfed.results.groups import Group, common_parent, grouped, repeated, runs_of, singles
from lightfed.results.outcome import primary_metric
from lightfed.results.run import Run, read
from lightfed.results.tables import rounds_text, without_shared_columns
from lightfed.results.units import is_share
from lightfed.studies.fedbcd.clouds import timed
from lightfed.studies.flexifed.strategies import Study, studies
from lightfed.studies.flexifed.strategy_table import StrategyTable, print_strategies
from lightfed.studies.pfedmoe.method_table import markup, print_methods
from lightfed.studies.pfedmoe.methods import Protocol, protocols
from lightfed.utils.errors import UserError

SETTINGS = ("seed", "algorithm", "data", "clients", "rounds")
SPARE = (
    *("train loss", "time / round", "between servers", "stored / client", "compute"),
    *("rounds", "algorithm", "seed", "worst 10 %"),
)
GROUPED_NOTE = "mean +- sample standard deviation over the seeds of a row"
MOST_LINES = 12  # that can be distinguished in one picture
STRATEGY_TABLE, VERDICTS = "comparison-strategies.csv", "comparison-verdicts.csv"


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        rows: of the table of final values.
        column: of metrics.csv, for the lines.
        lines: of the common picture, see `lines_of`.
        studies: of FlexiFed's strategies.
        protocols: in which pFedMoE is compared with other methods.
        contests: the metrics in which experiments are compared seed by seed.
        target: as requested.
        notes: about unfinished runs.
    """

    rows: Sequence[Group]
    column: str
    lines: Sequence[Group]
    studies: Sequence[Study]
    protocols: Sequence[Protocol]
    contests: Sequence[Contest]
    target: float | None
    notes: Sequence[str]

    @property
    def runs(self) -> list[Run]:
        return runs_of(self.rows)

    @property
    def strategies(self) -> StrategyTable | None:
        return StrategyTable(self.studies, self.target) if self.studies else None

    @property
    def further_contests(self) -> list[Contest]:
        """Those that are not yet in the table of a protocol."""
        known = [{(m.group, p.column) for m in p.members} for p in self.protocols]
        return [c for c in self.contests if not any(set(c.columns.items()) <= p for p in known)]


def compare(
    runs: Sequence[Path],
    *,
    output: Path | None = None,
    group: bool = False,
    target: float | None = None,
) -> Path:
    """Write the picture and the page of a comparison, and print its table.

    Args:
        runs: two or more run folders; a folder named twice counts once.
        output: the folder to write to, created if needed; by default the deepest that holds all
            runs.
        group: whether runs that differ only in the seed share a row.
        target: value of the metric to reach, see `charts`.

    Returns:
        The page, comparison.html.

    Raises:
        UserError: there are fewer than two runs, a folder is not a run, the target is not a
            possible value or applies to none of the runs, or the output cannot be written.
    """
    folders = list({run.resolve(): run for run in runs}.values())
    if len(folders) < 2:
        raise UserError("report", f"a comparison of {len(folders)} run", "name two or more runs")
    files = [read(folder) for folder in folders]
    rows = grouped(files) if group else singles(files)
    column, lines = common_metric(files), lines_of(rows)
    charted = studies(files), protocols(files), contests(files)
    found = Comparison(rows, column, lines, *charted, target, unfinished(files))
    _check_target(found)
    content = comparison_table(rows, found.column, target=target)
    page = _write(found, content, target=common_parent(files) if output is None else output)
    console = new_console()
    narrow, shared = without_shared_columns(content, SETTINGS)
    if shared:
        print_line(console, f"all runs: {shared}")
    print_table(console, narrow, spare=SPARE)
    if group:
        print_line(console, GROUPED_NOTE)
    for note in found.notes:
        print_line(console, note)
    if found.strategies:
        print_strategies(console, found.strategies)
    print_methods(console, found.protocols, target)
    print_verdicts(console, found.further_contests)
    print_line(console, f"page: {page}")
    return page


def unfinished(runs: Sequence[Run]) -> list[str]:
    """Notes that name the runs left out of their group's means, and other unfinished runs."""
    out = [run for group in grouped(runs) for run in group.left_out]
    rest = [run for run in runs if not run.finished and run not in out]
    notes = {"not finished, in no mean over seeds": out, "not finished": rest}
    return [f"{text}: {', '.join(map(_how_far, found))}" for text, found in notes.items() if found]


def _how_far(run: Run) -> str:
    return f"{run.name} ({rounds_text(run)} rounds)"


def lines_of(rows: Sequence[Group]) -> Sequence[Group]:
    """The rows; if there are too many, the experiments; none if these are too many as well."""
    runs = [run for row in rows for run in row.runs]
    return next((lines for lines in (rows, grouped(runs)) if len(lines) <= MOST_LINES), ())


def common_metric(runs: Sequence[Run]) -> str:
    """The first run's primary metric that all runs measured, else that of the first run."""
    candidates = [*(primary_metric(run) for run in runs), "train_loss"]
    shared = [name for name in candidates if all(run.series(name).notna().any() for run in runs)]
    return (shared or candidates)[0]


def _check_target(found: Comparison) -> None:
    target, key = found.target, "--target"
    if target is None:
        return
    metrics = [study.topic.metric for study in found.studies]
    metrics += [protocol.metric for protocol in found.protocols]
    metrics += [found.column] if any(map(timed, found.runs)) else []
    if not metrics:
        fix = "drop it: it applies to these, to clouds and to methods compared with pFedMoE"
        raise UserError(key, "no run of a strategy of FlexiFed", fix)
    shares = all(map(is_share, metrics))
    if not math.isfinite(target) or (shares and not 0 < target <= 1):
        fix = "give an accuracy in 0..1, such as 0.8" if shares else "give a finite number"
        raise UserError(key, f"{target:g}", fix)


def _write(found: Comparison, content: DataFrame, *, target: Path) -> Path:
    image = render(partial(comparison_figure, found.lines, found.column))
    every = charts(found.runs, target=found.target)
    drawn = [(chart, drawing) for chart in every if (drawing := render(chart.draw))]
    files = {chart.file: drawing.light for chart, drawing in drawn}
    if image is not None:
        files["comparison.png"] = image.light
    if found.strategies:
        files[STRATEGY_TABLE] = found.strategies.csv().encode()
    if found.contests:
        files[VERDICTS] = verdicts_csv(found.contests).encode()
    for name, written in files.items():
        write_file(target / name, written)
    singular = (target / name for name in ("comparison.png", STRATEGY_TABLE, VERDICTS))
    for old in (*singular, *(p for f in FILES for p in target.glob(f))):
        if old.name not in files:
            old.unlink(missing_ok=True)  # a picture of other runs would now be wrong
    page = target / "comparison.html"
    write_file(page, _page(found, image, drawn, content).encode())
    return page


def _page(
    found: Comparison,
    image: Image | None,
    drawn: Sequence[tuple[Chart, Image]],
    content: DataFrame,
) -> str:
    rows, lines = found.rows, enumerate(found.lines)
    places = {run: place for place, line in lines for run in (*line.runs, *line.left_out)}
    tables = found.strategies.markup() if found.strategies else []
    return document(
        f"Comparison of {len(found.runs)} runs",
        template="comparison.html",
        lead=_lead(found),
        image=image,
        repeated=repeated(found.lines),
        most=None if found.lines else MOST_LINES,
        charts=drawn,
        tables=[*tables, *(part for p in found.protocols for part in markup(p, found.target))],
        figures=content,
        dots=[places[row.runs[0]] for row in rows] if places else (),
        note=f"{GROUPED_NOTE.capitalize()}." if repeated(rows) else "",
        verdicts=verdicts_markup(found.further_contests),
    )


def _lead(found: Comparison) -> list[tuple[str, str]]:
    """Paragraphs: the rows, unless there are too many, and which data are synthetic."""
    several = [("lead", ", ".join(row.name for row in found.rows))]
    synthetic = [run.name for run in found.runs if run.synthetic]
    text = ", ".join(synthetic) if len(synthetic) <= MOST_LINES else f"{len(synthetic)} runs"
    return [
        *(several if len(found.rows) <= MOST_LINES else []),
        *([("note", f"Synthetic data: {text}.")] if synthetic else []),
        *(("note", f"{note[0].upper()}{note[1:]}.") for note in found.notes),
    ]
