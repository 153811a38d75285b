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
TABLES = {"csv": "csv", "latex": "tex", "markdown": "md"}  # and the ends of their files
VERSION = "6.4"  # of Vega-Lite, for the page and for files
WIDTH = 380  # pixels of a chart


def picture(figure: Figure, format: str) -> bytes:
    """The figure as `svg`, `pdf` or `png`, in light colours and with a legend in it."""
    charts = []
    for chart in figure.charts:
        values = chart.values
        rows = [dict(zip(values["columns"], row, strict=True)) for row in values["data"]]
        charts.append(chart.spec | {"title": chart.title, "width": WIDTH, "data": {"values": rows}})
    resolve = {"scale": dict.fromkeys(("color", "strokeDash"), "independent")}
    layout = {"columns": 2, "spacing": 30, "resolve": resolve, "config": THEME["config"]}
    spec = all_plain(coloured({"concat": charts, **layout}, "light"))
    if format == "svg":
        return vl_convert.vegalite_to_svg(spec, vl_version=VERSION).encode()
    if format == "pdf":
        return vl_convert.vegalite_to_pdf(spec, vl_version=VERSION)
    return vl_convert.vegalite_to_png(spec, vl_version=VERSION, scale=2)


def table_text(table: pd.DataFrame, format: str) -> str:
    """The table as `csv`, `markdown` or `latex` (with booktabs); names are escaped for LaTeX."""
    table = table.rename(columns=plain).map(all_plain)
    if format == "csv":
        return table.to_csv(index=False, lineterminator="\n")
    if format == "markdown":
        return markdown(table) + "\n"
    style = table.style.hide(axis="index").format_index(escape="latex", axis="columns")
    style = style.format(
        lambda x: f"{x:.5g}" if isinstance(x, float) else _bold(str(x)), escape="latex", na_rep=""
    )
    sides = "l" + "r" * (len(table.columns) - 1)
    text: str = style.to_latex(hrules=True, column_format=sides)
    text = re.sub(r"(?m)^([\[*])", r"{}\1", text)  # else an argument of the end of the line before
    return text.replace(" +- ", r" $\pm$ ")


def markdown(table: pd.DataFrame) -> str:
    """The table for a document; a bar within a cell is escaped."""
    rows = [[*table.columns], ["---"] * table.shape[1], *table.itertuples(index=False, name=None)]
    lines = []
    for row in rows:
        cells = [str(value).replace("|", r"\|") for value in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("+-", "±")


def listed(kinds: Sequence[str], text: str) -> list[str]:
    """The words of `csv,latex`, as an argument; each is one of `kinds`."""
    words = text.split(",")
    for word in words:
        if word not in kinds:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(kinds)}")
    return words


def _bold(cell: str) -> str:
    """A cell with a star, which marks the best, in bold."""
    return rf"\textbf{{{cell[1:]}}}" if cell.startswith("*") else cell


def write_files(
    figures: Sequence[Figure],
    tables: Mapping[str, pd.DataFrame],
    folder: Path,
    formats: Sequence[str],
    kinds: Sequence[str],
) -> None:
    """Write figures in some formats, and their tables and others by name as files of some kinds."""
    for figure in figures:
        for format in formats:
            write_file(folder / f"{figure.name}.{format}", picture(figure, format))
    for kind in kinds:
        for name, table in {**tables, **{figure.name: figure.table for figure in figures}}.items():
            write_file(folder / f"{name}.{TABLES[kind]}", table_text(table, kind).encode())


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically; a UserError if the folder cannot be written to."""
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
