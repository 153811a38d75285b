"""Files of figures and tables: SVG, PDF and PNG; CSV and LaTeX."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import vl_convert

from lightfed.lab.drawing.marks import THEME, Figure, coloured
from lightfed.utils.errors import UserError
from lightfed.utils.plain_text import all_plain, plain

FORMATS = ("svg", "pdf", "png")

# The formats of tables, and the ends of their files.
TABLES = {"csv": "csv", "latex": "tex", "markdown": "md"}

# The version of Vega-Lite, for the page and for files.
VERSION = "6.4"

# The width of a chart in pixels.
WIDTH = 380


def picture(figure: Figure, format: str) -> bytes:
    """Return a figure as a picture in light colors with a legend in it.

    Args:
        figure: The figure.
        format: One of `FORMATS`.
    """
    charts = []
    for chart in figure.charts:
        values = chart.values
        rows = [dict(zip(values["columns"], row, strict=True)) for row in values["data"]]
        charts.append(chart.spec | {"title": chart.title, "width": WIDTH, "data": {"values": rows}})

    # Each chart has a legend of its own.
    all_charts = {
        "concat": charts,
        "columns": 2,
        "spacing": 30,
        "resolve": {"scale": {"color": "independent", "strokeDash": "independent"}},
        "config": THEME["config"],
    }
    spec = all_plain(coloured(all_charts, "light"))
    if format == "svg":
        return vl_convert.vegalite_to_svg(spec, vl_version=VERSION).encode()
    if format == "pdf":
        return vl_convert.vegalite_to_pdf(spec, vl_version=VERSION)
    return vl_convert.vegalite_to_png(spec, vl_version=VERSION, scale=2)


def table_text(table: pd.DataFrame, format: str) -> str:
    """Return a table as text.

    Args:
        table: The table.
        format: One of `TABLES`. LaTeX needs the package booktabs; names are escaped for it.
    """
    table = table.rename(columns=plain).map(all_plain)
    if format == "csv":
        return table.to_csv(index=False, lineterminator="\n")
    if format == "markdown":
        return markdown(table) + "\n"

    style = table.style.hide(axis="index").format_index(escape="latex", axis="columns")
    style = style.format(_latex_cell, escape="latex", na_rep="")
    first_left_others_right = "l" + "r" * (len(table.columns) - 1)
    text: str = style.to_latex(hrules=True, column_format=first_left_others_right)

    # LaTeX would take a star or a bracket for an argument of the end of the line before.
    text = re.sub(r"(?m)^([\[*])", r"{}\1", text)
    return text.replace(" +- ", r" $\pm$ ")


def markdown(table: pd.DataFrame) -> str:
    """Return a table in Markdown; a bar within a cell is escaped."""
    head = list(table.columns)
    rows = [head, ["---"] * len(head), *table.itertuples(index=False, name=None)]
    lines = []
    for row in rows:
        cells = [str(value).replace("|", r"\|") for value in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("+-", "±")


def listed(kinds: Sequence[str], text: str) -> list[str]:
    """Return the words of an option such as `csv,latex`.

    Args:
        kinds: The known words.
        text: The option.

    Raises:
        argparse.ArgumentTypeError: A word is unknown.
    """
    words = text.split(",")
    for word in words:
        if word not in kinds:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(kinds)}")
    return words


def _latex_cell(value: object) -> str:
    """Return a cell for LaTeX; the best, which has a star, is bold."""
    if isinstance(value, float):
        return f"{value:.5g}"
    text = str(value)
    return rf"\textbf{{{text[1:]}}}" if text.startswith("*") else text


def write_files(
    figures: Sequence[Figure],
    tables: Mapping[str, pd.DataFrame],
    folder: Path,
    formats: Sequence[str],
    kinds: Sequence[str],
) -> None:
    """Write figures and tables as files.

    Args:
        figures: The figures.
        tables: Tables by the names of their files. Each figure adds the table of its numbers.
        folder: The folder to write to.
        formats: The formats of figures.
        kinds: The formats of tables.

    Raises:
        UserError: The folder cannot be written to.
    """
    for figure in figures:
        for format in formats:
            write_file(folder / f"{figure.name}.{format}", picture(figure, format))

    if not kinds:
        return
    all_tables = dict(tables)
    for figure in figures:
        all_tables[figure.name] = figure.table
    for kind in kinds:
        for name, table in all_tables.items():
            write_file(folder / f"{name}.{TABLES[kind]}", table_text(table, kind).encode())


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically.

    Raises:
        UserError: The folder cannot be written to.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise UserError(
            key="report",
            found=f"{path} cannot be written: {error.strerror}",
            fix="make the folder writable or choose another",
        ) from error
