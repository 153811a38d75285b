"""Tables in the terminal."""

from collections.abc import Sequence

from pandas import DataFrame
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from lightfed.utils.plain_text import plain

# Characters of a line in a pipe or file: enough not to break the cells of a table.
WIDTH_OF_A_FILE = 240


def new_console() -> Console:
    """Return a console that prints to standard output."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_FILE
    return console


def print_line(console: Console, text: str) -> None:
    """Print one line without wrapping it, so that paths can be copied."""
    console.print(Text(plain(text)), soft_wrap=True)


def print_table(console: Console, content: DataFrame, *, left: Sequence[int] = (0,)) -> None:
    """Print a table; if it is too wide, its heads are wrapped.

    Args:
        console: Where to print.
        content: The table.
        left: The positions of columns that are aligned to the left.
    """
    content = content.map(plain)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for position, head in enumerate(content.columns):
        widest = max((Text(cell).cell_len for cell in content.iloc[:, position]), default=0)
        side: JustifyMethod = "left" if position in left else "right"
        table.add_column(Text(plain(head)), justify=side, overflow="fold", min_width=widest)

    # As `Text`, because rich would take brackets in a string for markup.
    for row in content.itertuples(index=False, name=None):
        table.add_row(*map(Text, row))
    console.print(table)
