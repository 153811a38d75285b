"""Several runs side by side: comparison.png, comparison.html and a table with a row per run.

Federations of levels, and methods that are measured after aggregation and after local training, get
charts of their own, comparison-*.png.

With `group`, runs that differ in the seed alone share a row: mean +- sample standard deviation.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from lightfed.report.charts import FILES, Chart, charts
from lightfed.report.groups import Group, common_parent, grouped, singles
from lightfed.report.markup import document, heading, paragraph, picture, table, title, write_file
from lightfed.report.outcome import (
    Outcome,
    base_name,
    mean_and_std,
    outcome_of,
    primary_metric,
)
from lightfed.report.plots import Image, render
from lightfed.report.runfiles import RunFiles, load
from lightfed.report.summary import new_console, print_line, print_table
from lightfed.report.tables import TextTable, readable
from lightfed.report.units import (
    NOTHING,
    bytes_text,
    count_text,
    flops_text,
    seconds_text,
    spread_text,
)
from lightfed.report.versus import comparison_figure
from lightfed.utils.errors import UserError

SETTINGS = ("seed", "algorithm", "data", "clients", "rounds")
SPARE = (
    *("train loss", "time / round", "stored / client", "compute"),
    *("rounds", "algorithm", "seed", "worst 10 %"),
)
GROUPED_NOTE = "mean +- sample standard deviation over the seeds of a row"


def compare(runs: Sequence[Path], *, output: Path | None = None, group: bool = False) -> Path:
    """Writes the picture and the page of a comparison, and prints its table.

    Args:
        runs: two or more run folders; a folder named twice counts once.
        output: the folder to write to, made if need be; None: the deepest that holds all runs.
        group: whether runs that differ in the seed alone share a row.

    Returns:
        The page, comparison.html.

    Raises:
        UserError: fewer than two runs, a folder that is no run's, or nothing can be written.
    """
    folders = list({run.resolve(): run for run in runs}.values())
    if len(folders) < 2:
        raise UserError("report", f"a comparison of {len(folders)} run", "name two or more runs")
    files = [load(folder) for folder in folders]
    rows = grouped(files) if group else singles(files)
    target = common_parent(files) if output is None else output
    column = common_metric(files)
    content = comparison_table(rows, column)
    page = _write(rows, column, content, target=target)
    console = new_console()
    narrow, shared = content.without_shared_columns(SETTINGS)
    if shared:
        print_line(console, f"all runs: {shared}")
    print_table(console, narrow, spare=SPARE)
    if group:
        print_line(console, GROUPED_NOTE)
    print_line(console, f"page: {page}")
    return page


def common_metric(runs: Sequence[RunFiles]) -> str:
    """The first primary metric of a run that all runs measured, else that of the first run."""
    candidates = [*(primary_metric(run) for run in runs), "train_loss"]
    shared = [
        name for name in candidates if all(np.isfinite(run.series(name)).any() for run in runs)
    ]
    return (shared or candidates)[0]


def comparison_table(rows: Sequence[Group], column: str) -> TextTable:
    """One row per run or group: the final figures; columns nobody measured are left out."""
    name = readable(base_name(column))
    headers = (
        "run",
        *SETTINGS,
        f"global {name}",
        f"personal {name}",
        "worst 10 %",
        "train loss",
        "sent",
        "compute",
        "stored / client",
        "time / round",
    )
    return TextTable(headers, tuple(_row(row, column) for row in rows)).without_empty_columns()


def _row(row: Group, column: str) -> tuple[str, ...]:
    outcomes = [outcome_of(run, primary=column) for run in row.runs]

    def over_runs(figure: Callable[[Outcome], float]) -> tuple[float, float]:
        return mean_and_std([figure(outcome) for outcome in outcomes])

    metric = base_name(column)
    return (
        row.label,
        *(_told(row, key) for key in ("seed", "algorithm", "dataset")),
        count_text(over_runs(lambda o: math.nan if o.clients is None else o.clients)[0]),
        count_text(over_runs(lambda o: o.rounds)[0]),
        spread_text(metric, *over_runs(lambda o: o.overall)),
        spread_text(metric, *over_runs(lambda o: o.personal)),
        spread_text(metric, *over_runs(lambda o: o.worst10)),
        spread_text("loss", *over_runs(lambda o: o.train_loss)),
        bytes_text(over_runs(lambda o: o.sent)[0]),
        flops_text(over_runs(lambda o: o.flops)[0]),
        bytes_text(over_runs(lambda o: o.stored_bytes)[0]),
        seconds_text(over_runs(lambda o: o.seconds_per_round)[0]),
    )


def _told(row: Group, key: str) -> str:
    """What the environments of the runs say, each answer once."""
    said = [str(run.environment[key]) for run in row.runs if run.environment.get(key) is not None]
    return ", ".join(dict.fromkeys(said)) or NOTHING


def _write(rows: Sequence[Group], column: str, content: TextTable, *, target: Path) -> Path:
    image = render(partial(comparison_figure, rows, column))
    found = charts([run for row in rows for run in row.runs])
    drawn = [(chart, drawing) for chart in found if (drawing := render(chart.draw))]
    pictures = {chart.file: drawing for chart, drawing in drawn}
    if image is not None:
        pictures["comparison.png"] = image
    for name, drawing in pictures.items():
        write_file(target / name, drawing.light)
    for old in (target / "comparison.png", *(p for f in FILES for p in target.glob(f))):
        if old.name not in pictures:
            old.unlink(missing_ok=True)  # a picture of other runs would now be wrong
    page = target / "comparison.html"
    write_file(page, _page(rows, image, drawn, content).encode())
    return page


def _page(
    rows: Sequence[Group],
    image: Image | None,
    drawn: Sequence[tuple[Chart, Image]],
    content: TextTable,
) -> str:
    runs = [run for row in rows for run in row.runs]
    several = any(len(row.runs) > 1 for row in rows)
    name = f"Comparison of {len(runs)} runs"
    body = [title(name), paragraph(", ".join(row.label for row in rows), kind="lead")]
    if any(run.synthetic for run in runs):
        text = ", ".join(run.name for run in runs if run.synthetic)
        body.append(paragraph(f"Synthetic data: {text}.", kind="note"))
    if image is None:
        body.append(paragraph("No curves: fewer than two rounds were measured.", kind="note"))
    else:
        caption = "The band is one sample standard deviation over seeds." if several else ""
        body.append(picture(image, alt="Course of the runs", caption=caption))
    for chart, drawing in drawn:
        body.append(heading(chart.heading))
        body.append(picture(drawing, alt=chart.heading, caption=chart.caption))
    body += [heading("Final figures"), table(content, dots=range(len(rows)))]
    if several:
        body.append(paragraph(GROUPED_NOTE.capitalize() + ".", kind="small"))
    return document(name, body)
