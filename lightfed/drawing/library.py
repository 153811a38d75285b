"""Vega, Vega-Lite and vega-embed in one script, packed for a page.

vl-convert brings them and bundles them in two seconds, so the packed script is kept in the user's
cache folder.
"""

import base64
import gzip
import hashlib
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightfed.drawing.charts import VERSION
from lightfed.drawing.files import write_file
from lightfed.utils.errors import UserError

LICENCES = (
    "Vega, Vega-Lite, vega-embed and vega-tooltip: copyright University of Washington Interactive "
    "Data Lab and contributors, BSD 3-Clause licence. D3: copyright Mike Bostock, ISC licence."
)
SNIPPET = "window.vegaEmbed = vegaEmbed;"


@dataclass(frozen=True)
class Library:
    """A script for a page, in gzip and base64 (0.4 instead of 0.9 MB), and its digest."""

    packed: str
    digest: str


@cache
def library() -> Library:
    """The script that draws charts, from the cache if it is there and whole."""
    from importlib.metadata import version

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    place = home / "lightfed" / f"vega-{VERSION}-{version('vl-convert-python')}.js.gz"
    try:
        packed = place.read_bytes()
        script = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error):
        script = _bundle()
        packed = gzip.compress(script, mtime=0)
        with suppress(UserError):  # without a place for it, each report bundles the script again
            write_file(place, packed)
    return Library(base64.b64encode(packed).decode("ascii"), digest(script))


def digest(script: bytes) -> str:
    """How a content policy names a script that may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode('ascii')}"


def _bundle() -> bytes:
    import vl_convert

    return vl_convert.javascript_bundle(SNIPPET, vl_version=VERSION).encode()
