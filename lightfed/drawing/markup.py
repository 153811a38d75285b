"""Pages that need nothing from outside: templates, charts with their data, and the library.

A page works from a file, offline, under a content policy that lets only its own two scripts run
and nothing be fetched. It draws its charts in the reader's colours and draws them again if these
change. Every text is escaped. `parts()` has the macros of templates/parts.html.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from lightfed.drawing.charts import Chart, Figure
from lightfed.drawing.library import LICENCES, digest, library
from lightfed.drawing.theme import DARK, LIGHT, coloured, config, dash_of

if TYPE_CHECKING:
    import pandas as pd

DIGITS = 5  # of a number in a chart


@cache
def parts() -> Any:
    """The macros of parts.html; each returns markup."""
    return _environment().get_template("parts.html").module


def document(name: str, *, template: str, refresh: int = 0, **also: Any) -> str:
    """A whole page.

    `name` is the title of the browser tab, `template` a file in templates/. The page loads itself
    again after `refresh` seconds; 0 for a page that stays.
    """
    own, packed = _script(), library()
    policy = f"script-src '{digest(own.encode())}' '{packed.digest}'"
    page = _environment().get_template(template)
    return page.render(
        name=name,
        refresh=refresh,
        script=Markup(own),
        packed=packed.packed,
        policy=f"default-src 'none'; {policy}; style-src 'unsafe-inline'; img-src data:",
        looks={"light": coloured(config(), LIGHT), "dark": coloured(config(), DARK)},
        colours={"light": LIGHT.colours, "dark": DARK.colours},
        licences=LICENCES,
        **also,
    )


def content(figure: Figure) -> list[dict[str, Any]]:
    """What the page's script draws: each chart's specification and the columns of its data."""
    return [
        {
            "spec": chart.spec,
            "data": {name: _column(chart.data[name]) for name in chart.data},
            "headings": chart.headings,
            "formats": chart.formats,
            "series": chart.series is not None,
        }
        for chart in figure.charts
    ]


def describe(chart: Chart) -> str:
    """For readers who do not see the chart."""
    names = [] if chart.series is None else list(dict.fromkeys(chart.data["series"]))
    of = f" of {', '.join(map(str, names[:12]))}" if names else ""
    return f"{chart.title}{of}. The numbers are in the table below the figure."


def _column(values: pd.Series[Any]) -> Any:
    """Numbers with DIGITS digits, up to the last that is known; names once each, with places.

    Places that repeat are written once, and how many times, where that is shorter.
    """
    if values.dtype.kind == "b":
        return [bool(value) for value in values]
    if values.dtype.kind in "iuf":
        known = len(values) - int(values[::-1].notna().to_numpy().argmax()) if len(values) else 0
        return [_number(value) for value in values.tolist()[:known]]
    codes, labels = values.factorize()
    named = {"of": [str(name) for name in labels]}
    begins = np.flatnonzero(np.diff(codes, prepend=-2))
    if 2 * len(begins) > len(codes):
        return {**named, "at": codes.tolist()}
    times = np.diff(begins, append=len(codes))
    return {**named, "at": codes[begins].tolist(), "times": times.tolist()}


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
    return int(short) if short == int(short) and abs(short) < 2**53 else short


def _script() -> str:
    return (files("lightfed.drawing") / "templates" / "charts.js").read_text("utf-8")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("lightfed.drawing"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # and columns in their order
    made.filters |= {"typeset": _typeset, "content": content, "describe": describe}
    made.globals |= {"light": LIGHT, "dark": DARK, "dash": dash_of, "series": len(LIGHT.series)}
    return made


def _typeset(text: str) -> Markup:
    """Escaped, with a true plus-minus and minus sign."""
    return escape(text).replace(" +- ", Markup(" &plusmn; "))
