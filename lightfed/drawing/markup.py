"""HTML that needs nothing from outside: escaped text, inline CSS, pictures as data URIs."""

import base64
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from lightfed.drawing.image import Image
from lightfed.drawing.style import DARK, DPI, LIGHT, PALETTE, Theme
from lightfed.results.tables import Figure, TextTable
from lightfed.utils.errors import UserError

LAYOUT = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 6px;
  overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 12px; }
.lead { color: var(--muted); font-size: 16px; margin: 0 0 24px; }
.note { border-left: 3px solid var(--accent); background: var(--face); color: var(--ink);
  border-radius: 0 8px 8px 0; padding: 8px 14px; margin: 0 0 12px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(208px, 1fr)); gap: 12px; }
.card { background: var(--face); border: 1px solid var(--grid); border-radius: 10px;
  padding: 14px 16px; }
.card .label { color: var(--muted); font-size: 13px; }
.card .value { font-size: 20px; font-weight: 650; letter-spacing: -0.01em; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
figure { margin: 0; background: var(--face); border: 1px solid var(--grid); border-radius: 10px;
  padding: 16px; text-align: center; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.small { color: var(--muted); font-size: 13px; }
figcaption { color: var(--muted); font-size: 13px; text-align: left; margin-top: 12px; }
.scroll { overflow-x: auto; background: var(--face); border: 1px solid var(--grid);
  border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 8px 14px; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 600; font-size: 13px; white-space: normal;
  vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tbody tr { border-top: 1px solid var(--grid); }
.dense { font-size: 11.5px; }
.dense th, .dense td { padding: 5px 3px; font-size: inherit; }
.dense th[rowspan], .dense td:first-child { padding-left: 10px; white-space: normal; }
.dense .start { border-left: 1px solid var(--grid); text-align: right; }
.dense th[colspan] { text-align: center; }
.dense .best { color: var(--accent); font-weight: 700; }
.plain td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.plain td:first-child { color: var(--muted); width: 30%; }
details { background: var(--face); border: 1px solid var(--grid); border-radius: 10px;
  margin-top: 12px; }
summary { cursor: pointer; padding: 12px 16px; font-weight: 600; }
pre { margin: 0; padding: 4px 16px 16px; overflow-x: auto;
  font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
@media print { body { background: #fff; } figure, .card, .scroll { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Cell:
    """A number of a table, and whether it is the best of those that it is held against."""

    text: str
    best: bool = False


def document(name: str, body: Sequence[str]) -> str:
    """A whole page; `body` is markup, `name` is the text of its tab."""
    dots = "".join(f".c{i} {{ background: {colour}; }}\n" for i, colour in enumerate(PALETTE))
    style = f"{_colours(LIGHT, page='#f3f5f8')}{_dark()}{LAYOUT}{dots}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{typeset(name)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def title(text: str) -> str:
    return f"<h1>{typeset(text)}</h1>"


def heading(text: str) -> str:
    return f"<h2>{typeset(text)}</h2>"


def paragraph(text: str, *, kind: str) -> str:
    return f'<p class="{kind}">{typeset(text)}</p>'


def cards(figures: Sequence[Figure]) -> str:
    return f'<div class="cards">{"".join(_card(figure) for figure in figures)}</div>'


def picture(image: Image, *, alt: str, caption: str) -> str:
    """Both schemes in one element; the browser shows the one that fits."""
    source = f'media="(prefers-color-scheme: dark)" srcset="{_data_uri(image.dark)}"'
    shown = f'src="{_data_uri(image.light)}" width="{_css_width(image.light)}" alt="{escape(alt)}"'
    return (
        f"<figure><picture><source {source}><img {shown}></picture>"
        f"<figcaption>{typeset(caption)}</figcaption></figure>"
    )


def table(content: TextTable, *, dots: Sequence[int] = ()) -> str:
    """A table of numbers; `dots` are the colours before the first cell of each row."""
    head = "".join(f"<th>{typeset(cell)}</th>" for cell in content.headers)
    rows = []
    for number, row in enumerate(content.rows):
        dot = f'<span class="dot c{dots[number] % len(PALETTE)}"></span>' if dots else ""
        cells = [f"<td>{dot}{typeset(row[0])}</td>", *(f"<td>{typeset(c)}</td>" for c in row[1:])]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def table_of_groups(
    first: str,
    groups: Sequence[tuple[str, Sequence[str]]],
    rows: Sequence[tuple[str, Sequence[Cell]]],
) -> str:
    """A table with two lines of headers: a group over its columns; deviations below their means.

    Args:
        first: header of the first column.
        groups: name and headers.
        rows: name and cells, those of one group after those of the other.
    """
    starts = {sum(len(headers) for _, headers in groups[:i]) for i in range(len(groups))}
    over = "".join(
        f'<th class="start" colspan="{len(headers)}">{typeset(name)}</th>'
        for name, headers in groups
    )
    columns = [header for _, headers in groups for header in headers]
    under = "".join(
        f"<th{_classes('start' * (i in starts))}>{typeset(header)}</th>"
        for i, header in enumerate(columns)
    )
    body = "".join(
        f"<tr><td>{typeset(name)}</td>{''.join(_cell(c, i in starts) for i, c in enumerate(cells))}"
        "</tr>"
        for name, cells in rows
    )
    return (
        f'<div class="scroll"><table class="dense"><thead><tr><th rowspan="2">{typeset(first)}</th>'
        f"{over}</tr><tr>{under}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def pairs(items: Sequence[tuple[str, str]]) -> str:
    """A table of names and texts."""
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(text)}</td></tr>" for key, text in items)
    return f'<table class="plain"><tbody>{rows}</tbody></table>'


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def folded(summary: str, markup: str) -> str:
    return f"<details><summary>{typeset(summary)}</summary>{markup}</details>"


def typeset(text: str) -> str:
    """Escaped, with a true plus-minus sign."""
    return escape(text).replace(" +- ", " &plusmn; ")


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file at once: who reads it meanwhile sees the old one or the new one.

    Raises:
        UserError: the folder cannot be written to.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        found = f"{path} cannot be written: {error.strerror}"
        raise UserError("report", found, "make the folder writable or choose another") from error


def _card(figure: Figure) -> str:
    return (
        f'<div class="card"><div class="label">{typeset(figure.label)}</div>'
        f'<div class="value">{typeset(figure.value)}</div>'
        f'<div class="small">{typeset(figure.note)}</div></div>'
    )


def _cell(cell: Cell, start: bool) -> str:
    text = typeset(cell.text).replace(" &plusmn; ", "<br>&plusmn;")
    return f"<td{_classes('start' * start, 'best' * cell.best)}>{text}</td>"


def _classes(*names: str) -> str:
    """The attribute with those names that are not empty."""
    told = " ".join(name for name in names if name)
    return f' class="{told}"' if told else ""


def _css_width(png: bytes) -> int:
    """100 pixels an inch, so that the text of all pictures is of one size; the width is in IHDR."""
    return round(int.from_bytes(png[16:20], "big") * 100 / DPI)


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _colours(theme: Theme, *, page: str) -> str:
    return (
        f":root {{ --page: {page}; --face: {theme.face}; --ink: {theme.ink}; "
        f"--muted: {theme.muted}; --grid: {theme.grid}; --accent: {theme.accent}; }}\n"
    )


def _dark() -> str:
    return f"@media (prefers-color-scheme: dark) {{\n{_colours(DARK, page='#0d1117')}}}\n"
