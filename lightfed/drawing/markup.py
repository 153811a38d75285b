"""Self-contained HTML: escaped text, inline CSS, pictures as data URIs.

`parts()` has the macros of templates/parts.html: `heading`, `paragraph`, `table` and so on.
"""

import base64
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from lightfed.drawing.style import DARK, DPI, LIGHT, PALETTE
from lightfed.utils.errors import UserError


@dataclass(frozen=True)
class Cell:
    """A number in a table, and whether it is the best of those it is compared with."""

    text: str
    best: bool = False


def document(
    name: str, body: Sequence[str] = (), *, template: str = "page.html", **also: Any
) -> str:
    """A whole page.

    Args:
        name: title of the browser tab.
        body: parts in order, for the default template.
        template: a file in templates/.
        also: further variables of the template.
    """
    return _environment().get_template(template).render(name=name, body=body, **also)


@cache
def parts() -> Any:
    """The macros of parts.html; each returns markup."""
    return _environment().get_template("parts.html").module


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old one or the new one.

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


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("lightfed.drawing"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    made.filters |= {"typeset": _typeset, "data_uri": _data_uri, "css_width": _css_width}
    made.globals |= {"light": LIGHT, "dark": DARK, "palette": PALETTE, "colours": len(PALETTE)}
    return made


def _typeset(text: str) -> Markup:
    """Escaped, with a true plus-minus sign."""
    return escape(text).replace(" +- ", Markup(" &plusmn; "))


def _css_width(png: bytes) -> int:
    """100 pixels per inch, so that all pictures have one text size; the IHDR has the width."""
    return round(int.from_bytes(png[16:20], "big") * 100 / DPI)


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
