"""A figure as the bytes of a picture, in both colour schemes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightfed.drawing.style import DARK, LIGHT, Theme, png_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Image:
    """One picture as PNG in both colour schemes."""

    light: bytes
    dark: bytes


def render(draw: Callable[[Theme], Figure | None]) -> Image | None:
    """Draws a figure in both colour schemes; None where there is nothing to draw."""
    light, dark = draw(LIGHT), draw(DARK)
    if light is None or dark is None:
        return None
    return Image(light=png_bytes(light), dark=png_bytes(dark))
