"""Terminal output at the end of a run: key figures, client groups, and the path of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from lightfed.results.outcome import outcome_of
from lightfed.results.run import read
from lightfed.results.tables import client_group_table, headline, key_figures, measured, text_table

if TYPE_CHECKING:
    from pandas import DataFrame

WIDTH_OF_A_FILE = 240
BORDER = 3  # spaces and rule of a column
CLIENT_GROUP_SPARE = ("std", "down / client", "compute / client", "stored / client")


def print_summary(run: Path) -> None:
    """Print the tables of a run folder, and the path of its page; a UserError if it is none."""
    files = read(run)
    outcome = outcome_of(files)
    rows = [{"figure": f.label, "final": f.value, "note": f.note} for f in key_figures(outcome)]
    console = new_console()
    print_line(console, f"{files.name}: {headline(files)}")
    if files.synthetic:
        print_line(console, "synthetic data")
    print_table(console, text_table(rows), left=(0, 2), spare=("note",))
    if text := measured(outcome):
        print_line(console, text)
    if len(outcome.client_groups):
        print_table(console, client_group_table(outcome), spare=CLIENT_GROUP_SPARE)
    page = run / "index.html"
    if page.is_file():
        print_line(console, f"page: {page}")


def new_console() -> Console:
    """Standard output; in a pipe or file, lines are wide enough not to break cells."""
    console = Console(highlight=False, markup=False)
    width = None if console.is_terminal else WIDTH_OF_A_FILE
    return Console(highlight=False, markup=False, width=width)


def print_line(console: Console, text: str) -> None:
    """Print one line without wrapping it, so that paths can be copied."""
    console.print(Text(text), soft_wrap=True)


def print_table(
    console: Console, content: DataFrame, *, left: Sequence[int] = (0,), spare: Sequence[str] = ()
) -> None:
    """Print a table; if it is too wide, wrap headers and drop columns named in `spare`.

    `left` are positions of left-aligned columns; `spare` names columns in the order in which they
    are dropped. Brackets in cells are not markup.
    """
    for header in spare:
        if fits(console, content):
            break
        content = content.drop(columns=header, errors="ignore")
    widths = _widths(content, wrapped=False)
    if _total(widths) > console.width:
        widths = _widths(content, wrapped=True)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for number, (header, width) in enumerate(zip(content.columns, widths, strict=True)):
        justify: JustifyMethod = "left" if number in left else "right"
        table.add_column(Text(header), justify=justify, overflow="fold", width=width)
    for row in content.itertuples(index=False, name=None):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def fits(console: Console, content: DataFrame) -> bool:
    """Whether the console is wide enough not to break cells."""
    return _total(_widths(content, wrapped=True)) <= console.width


def _widths(content: DataFrame, *, wrapped: bool) -> list[int]:
    """Characters per column that keep cells and headers (if `wrapped`, their words) whole."""
    heads = [header.split() if wrapped else [header] for header in content.columns]
    columns = zip(heads, *content.to_numpy().tolist(), strict=True)
    return [max(map(cell_len, (*words, *cells, ""))) for words, *cells in columns]


def _total(widths: Sequence[int]) -> int:
    return sum(width + BORDER for width in widths) + 1
