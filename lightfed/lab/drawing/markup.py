"""Pages that need nothing from outside: templates, charts with their data, and Vega's script.

A page works from a file, offline, under a content policy that lets only its own two scripts run
and nothing be fetched. It draws its charts in the reader's colours and draws them again if these
change. Every text is escaped.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from lightfed.lab.drawing.files import VERSION, write_file
from lightfed.lab.drawing.marks import THEME, Figure, dash_of
from lightfed.utils.errors import UserError
from lightfed.utils.plain_text import all_plain, plain


def document(name: str, *, template: str, **also: Any) -> str:
    """A whole page.

    `name` is the title of the browser tab, `template` a file in templates/, and `also` what the
    template shows.
    """
    script = (files("lightfed.lab.drawing") / "templates" / "charts.js").read_text("utf-8")
    packed = library()
    allowed = f"'{digest(script.encode())}' '{digest(gzip.decompress(packed))}'"
    also |= {
        "script": Markup(script),
        "packed": base64.b64encode(packed).decode("ascii"),
        "policy": f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'",
    }
    return _environment().get_template(template).render(name=name, **also)


def _plain(value: Any) -> Any:
    """What a template shows: markup as it is, every other text plain."""
    if type(value) is not str:
        return value
    return "\n".join(map(plain, value.split("\n")))  # a configuration has lines


def content(figure: Figure) -> list[dict[str, Any]]:
    """What the page's script draws: each chart's specification, columns and data."""
    charts: list[dict[str, Any]] = [
        {
            "spec": chart.spec,
            "data": chart.values,
            "columns": {name: (axis.heading, axis.format) for name, axis in chart.columns.items()},
            "series": bool(chart.places),
        }
        for chart in figure.charts
    ]
    return [all_plain(chart) for chart in charts]


def library() -> bytes:
    """Vega, Vega-Lite and vega-embed in one script, in gzip.

    vl-convert bundles it in two seconds, so the script is kept in the user's cache folder.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    place = home / "lightfed" / f"vega-{VERSION}-{version('vl-convert-python')}.js.gz"
    if place.is_file():
        return place.read_bytes()
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VERSION)
    packed = gzip.compress(script.encode(), mtime=0)
    with suppress(UserError):  # without a place for it, each report bundles the script again
        write_file(place, packed)
    return packed


def digest(script: bytes) -> str:
    """How a content policy names a script that may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode('ascii')}"


@cache
def _environment() -> Environment:
    loader = PackageLoader("lightfed.lab.drawing")
    made = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.finalize = _plain
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # and columns in their order
    # escaped, with a true plus-minus sign
    made.filters["typeset"] = lambda text: escape(_plain(text)).replace(
        " +- ", Markup(" &plusmn; ")
    )
    made.filters["content"] = content
    made.globals |= {"theme": THEME, "dash": dash_of}
    return made
