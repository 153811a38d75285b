"""Files of figures and tables: SVG, PDF and PNG; CSV, LaTeX and Markdown."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import vl_convert

from lightfed.drawing.charts import Figure
from lightfed.drawing.theme import THEME, coloured
from lightfed.utils.errors import UserError

FORMATS = ("svg", "pdf", "png")
TABLES = {"csv": "csv", "latex": "tex", "markdown": "md"}  # and the ends of their files
VERSION = "6.4"  # of Vega-Lite, for the page and for files
WIDTH = 380  # pixels of a chart
# `[` and `*` after a line break are an option of it; `<`, `>` and `|` are other letters in OT1
LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {letter: f"{{{letter}}}" for letter in "[]*"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)
LIVE = ("params", "transform", "condition", "tooltip")


def picture(figure: Figure, format: str) -> bytes:
    """The figure as `svg`, `pdf` or `png`, in light colours and with a legend in it."""
    charts = [
        _still(chart.spec)
        | {"title": chart.title, "width": WIDTH, "data": {"values": records(chart.data)}}
        for chart in figure.charts
    ]
    resolve = {"scale": dict.fromkeys(("color", "strokeDash"), "independent")}
    layout = {"columns": 2, "spacing": 30, "resolve": resolve, "config": THEME["config"]}
    spec = coloured({"concat": charts, **layout}, "light")
    if format == "svg":
        return vl_convert.vegalite_to_svg(spec, vl_version=VERSION).encode()
    if format == "pdf":
        return vl_convert.vegalite_to_pdf(spec, vl_version=VERSION)
    return vl_convert.vegalite_to_png(spec, vl_version=VERSION, scale=2)


def records(data: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows; what is missing is None."""
    rows: Any = data.astype(object).where(data.notna(), None)
    return list(rows.to_dict("records"))


def table_text(table: pd.DataFrame, format: str) -> str:
    """The table as `csv`, `latex` or `markdown`; names are escaped."""
    if format == "csv":
        return table.to_csv(index=False, lineterminator="\n")
    if format == "latex":
        style = table.style.hide(axis="index").format(_latex, na_rep="")
        style = style.format_index(_latex, axis="columns")
        text = style.to_latex(hrules=True, column_format="l" + "r" * (len(table.columns) - 1))
        plain = re.sub(r"\\(top|mid|bottom)rule", r"\\hline", text)  # as of no package
        return plain.replace(" +- ", r" $\pm$ ")
    body = table.astype(object).where(table.notna(), "").itertuples(index=False, name=None)
    rows: list[tuple[object, ...]] = [tuple(table), ("---",) * len(table.columns), *body]
    cells = [[_cell(cell).replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def write_figures(figures: Sequence[Figure], folder: Path, formats: Sequence[str]) -> None:
    """Each figure in each of the formats; a UserError if the folder cannot be written to."""
    for figure in figures:
        for format in formats:
            write_file(folder / f"{figure.name}.{format}", picture(figure, format))


def write_table(table: pd.DataFrame, stem: Path, format: str) -> None:
    """The table as `stem` with the end of the format; errors as of `write_file`."""
    if len(table):
        path = stem.with_name(f"{stem.name}.{TABLES[format]}")
        write_file(path, table_text(table, format).encode())


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


def _still(spec: Any) -> Any:
    """Without what answers to a pointer."""
    if isinstance(spec, list):
        return [_still(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    return {key: _still(part) for key, part in spec.items() if key not in LIVE}


def _latex(value: object) -> str:
    return _cell(value).translate(LATEX)


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
