"""Files of figures and tables: SVG, PDF and PNG; CSV, LaTeX and Markdown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightfed.drawing.charts import SCHEMA, VERSION, Chart, Figure
from lightfed.drawing.theme import LIGHT, coloured, config
from lightfed.utils.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("svg", "pdf", "png")
TABLES = {"csv": "csv", "latex": "tex", "markdown": "md"}  # and the ends of their files
WIDTH = 380  # pixels of a chart
COLUMNS = 2
LIVE = ("$schema", "autosize", "params", "transform", "condition", "tooltip")


def static_spec(figure: Figure) -> dict[str, Any]:
    """The whole figure in Vega-Lite, in light colours and with a legend in it."""
    names = list(figure.series)
    charts = [_static_chart(chart, names) for chart in figure.charts]
    spec = {
        "$schema": SCHEMA,
        "config": config(),
        "columns": COLUMNS,
        "spacing": 30,
        "concat": charts,
        "resolve": {"scale": dict.fromkeys(("color", "strokeDash"), "independent")},
    }
    found: dict[str, Any] = coloured(spec, LIGHT)
    return found


def picture(figure: Figure, format: str) -> bytes:
    """The figure as `svg`, `pdf` or `png`."""
    import vl_convert

    spec = static_spec(figure)
    if format == "svg":
        return vl_convert.vegalite_to_svg(spec, vl_version=VERSION).encode()
    if format == "pdf":
        return vl_convert.vegalite_to_pdf(spec, vl_version=VERSION)
    return vl_convert.vegalite_to_png(spec, vl_version=VERSION, scale=2)


def table_text(table: pd.DataFrame, format: str) -> str:
    """The table as `csv`, `latex` or `markdown`; names are escaped."""
    if format == "csv":
        return table.to_csv(index=False, lineterminator="\n")
    if format == "markdown":
        cells = [[_markdown(text) for text in row] for row in _rows(table)]
        rule = ["---"] * len(table.columns)
        return "".join(f"| {' | '.join(row)} |\n" for row in (cells[0], rule, *cells[1:]))
    first, *rows = ([_latex(text) for text in row] for row in _rows(table))
    lines = [" & ".join(row) + r" \\" for row in (first, *rows)]
    columns = "l" + "r" * (len(table.columns) - 1)
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    return "\n".join((begin, r"\hline", lines[0], r"\hline", *lines[1:], r"\hline", end, ""))


def write_figures(figures: Sequence[Figure], folder: Path, formats: Sequence[str]) -> None:
    """Each figure in each of the formats; a UserError if the folder cannot be written to."""
    for figure in figures:
        for format in formats:
            write_file(folder / f"{figure.name}.{format}", picture(figure, format))


def write_table(table: pd.DataFrame, stem: Path, format: str) -> None:
    """The table as `stem` with the end of the format; errors as of `write_file`."""
    if len(table):
        write_file(
            stem.with_name(f"{stem.name}.{TABLES[format]}"), table_text(table, format).encode()
        )


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


def _static_chart(chart: Chart, names: Sequence[str]) -> dict[str, Any]:
    drawn = set(chart.data["series"]) if chart.series else set()
    legend: dict[str, Any] | None = None
    if len(drawn) > 1 and not chart.rows_are_series:
        shown = [name for name in names if name in drawn]
        legend = {"values": shown, "orient": "bottom", "columns": 3, "labelLimit": 200}
        legend |= {"symbolStrokeWidth": 2, "symbolOpacity": 1, "title": None}
        legend |= {"symbolType": "stroke"} if "strokeDash" in str(chart.spec) else {}
    own = {"title": chart.title, "width": WIDTH, "data": {"values": records(chart.data)}}
    return {**_still(chart.spec, legend), **own}


def records(data: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows; what is missing is None."""
    whole = data.astype(object).where(data.notna(), None)
    return [dict(zip(whole.columns, row, strict=True)) for row in whole.to_numpy().tolist()]


def _still(spec: Any, legend: Mapping[str, Any] | None) -> Any:
    """Without what answers to a pointer, and with Vega's legend."""
    if isinstance(spec, list):
        return [_still(one, legend) for one in spec]
    if not isinstance(spec, dict):
        return spec
    found = {key: _still(value, legend) for key, value in spec.items() if key not in LIVE}
    return found | {"legend": legend} if "legend" in spec and spec["legend"] is None else found


def _rows(table: pd.DataFrame) -> list[list[str]]:
    cells = table.astype(object).where(table.notna(), "").to_numpy()
    texts = [[f"{x:.5g}" if isinstance(x, float) else str(x) for x in row] for row in cells]
    return [list(map(str, table.columns)), *texts]


def _markdown(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _latex(text: str) -> str:
    r"""Escaped; a bracket or star that begins a row would be an argument of `\\` before it."""
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    named |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''"}
    named |= {c: f"\\{c}" for c in "&%$#_{}"} | {c: f"{{{c}}}" for c in "[]*"}
    words = " ".join(text.split())
    return "".join(named.get(letter, letter) for letter in words).replace(" +- ", r" $\pm$ ")
