"""Tables in the terminal."""

from collections.abc import Sequence

from pandas import DataFrame
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from lightfed.utils.plain_text import plain

WIDTH_OF_A_FILE = 240


def new_console() -> Console:
    """Standard output; in a pipe or file, lines are wide enough not to break cells."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_FILE
    return console


def print_line(console: Console, text: str) -> None:
    """Print one line without wrapping it, so that paths can be copied."""
    console.print(Text(plain(text)), soft_wrap=True)


def print_table(console: Console, content: DataFrame, *, left: Sequence[int] = (0,)) -> None:
    """Print a table; if it is too wide, wrap headers.

    `left` are positions of left-aligned columns. Brackets in cells are not markup.
    """
    content = content.map(plain)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for number, header in enumerate(content.columns):
        widest = max((Text(cell).cell_len for cell in content.iloc[:, number]), default=0)
        side: JustifyMethod = "left" if number in left else "right"
        table.add_column(Text(plain(header)), justify=side, overflow="fold", min_width=widest)
    for row in content.itertuples(index=False, name=None):
        table.add_row(*map(Text, row))
    console.print(table)
