"""Pages that need nothing from outside: templates, charts with their data, and Vega's script.

A page works from a file and offline. Its content policy lets only its own two scripts run, and
nothing be fetched. It draws its charts in the reader's colors, and draws them again if these
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
    """Return a whole page.

    Args:
        name: The title of the browser tab.
        template: The name of a file in templates/.
        also: What the template shows.
    """
    script = (files("lightfed.lab.drawing") / "templates" / "charts.js").read_text("utf-8")
    packed_library = library()
    own_digest = digest(script.encode())
    library_digest = digest(gzip.decompress(packed_library))
    policy = (
        f"default-src 'none'; script-src '{own_digest}' '{library_digest}'; "
        "style-src 'unsafe-inline'"
    )
    return (
        _environment()
        .get_template(template)
        .render(
            name=name,
            script=Markup(script),
            packed=base64.b64encode(packed_library).decode("ascii"),
            policy=policy,
            **also,
        )
    )


def _plain(value: Any) -> Any:
    """Return what a template shows: markup as it is, and every other text plain."""
    # Markup is derived from str, so the type is compared.
    if type(value) is not str:
        return value
    # By lines, because a configuration has several.
    return "\n".join(plain(line) for line in value.split("\n"))


def content(figure: Figure) -> list[dict[str, Any]]:
    """Return what the page's script draws: each chart's specification, columns and data."""
    charts = []
    for chart in figure.charts:
        columns = {name: (axis.heading, axis.format) for name, axis in chart.columns.items()}
        charts.append(
            all_plain(
                {
                    "spec": chart.spec,
                    "data": chart.values,
                    "columns": columns,
                    "series": bool(chart.places),
                }
            )
        )
    return charts


def library() -> bytes:
    """Return Vega, Vega-Lite and vega-embed in one script, compressed by gzip.

    vl-convert needs two seconds to bundle it, so the script is kept in the user's cache folder.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    path = cache_home / "lightfed" / f"vega-{VERSION}-{version('vl-convert-python')}.js.gz"
    if path.is_file():
        return path.read_bytes()

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VERSION)
    packed = gzip.compress(script.encode(), mtime=0)
    # Without a cache folder, each report bundles the script again.
    with suppress(UserError):
        write_file(path, packed)
    return packed


def digest(script: bytes) -> str:
    """Return the name by which a content policy allows a script to run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode('ascii')}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lightfed.lab.drawing"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain,
    )
    # The default of jinja2 would sort the columns by their names.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["typeset"] = _typeset
    environment.filters["content"] = content
    environment.globals |= {"theme": THEME, "dash": dash_of}
    return environment


def _typeset(text: Any) -> Markup:
    """Return an escaped text with a true plus-minus sign."""
    return escape(_plain(text)).replace(" +- ", Markup(" &plusmn; "))
