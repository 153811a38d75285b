"""Colours and dashes of all charts and pages, for light and dark screens.

A chart names its colours (`theme:ink`, `theme:c0`), and `coloured` puts in those of a theme. So a
page follows the reader's screen, and a file for a paper is light. Series colours have a contrast of
at least 3:1 with the background, texts one of at least 4.5:1 (WCAG 2.2 AA). They were chosen for
the largest distance in OKLab under normal vision and the three colour vision deficiencies of
Machado et al., "A Physiologically-based Model for Simulation of Color Vision Deficiency", TVCG
2009; dashes tell series apart where colours repeat or are printed in grey.
"""

import json
import re
from typing import Any, NamedTuple

DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (4, 4), (12, 3), (2, 5))


class Theme(NamedTuple):
    """Colours of one scheme: of the page, texts and frames, of series by place, of heat maps."""

    page: str
    face: str
    ink: str
    muted: str
    grid: str
    accent: str
    series: tuple[str, ...]
    ramp: tuple[str, ...]
    diverging: tuple[str, ...]

    def colours(self) -> dict[str, Any]:
        """By the names that follow `theme:` in a chart."""
        return self._asdict() | {f"c{place}": name for place, name in enumerate(self.series)}


LIGHT = Theme(
    page="#f3f5f8",
    face="#ffffff",
    ink="#1c2530",
    muted="#56636f",
    grid="#e1e6eb",
    accent="#00756b",
    series=(
        *("#0d8cee", "#8a1512", "#297672", "#7d22bb", "#a98f09", "#e048be", "#194273", "#af4511"),
    ),
    ramp=("#f4f6f8", "#c6dcec", "#7fb2d9", "#3a7fbd", "#1c4f8b", "#0c2b57"),
    diverging=("#8f4a00", "#e0a050", "#e2e5e8", "#6aa3d5", "#134f8c"),
)
DARK = Theme(
    page="#0d1117",
    face="#161c24",
    ink="#e6ebf1",
    muted="#a3b0be",
    grid="#2b3542",
    accent="#2fc4b2",
    series=(
        *("#73b5f8", "#e08720", "#86f0e6", "#a06ab8", "#e8e25a", "#d8545a", "#2b83f6", "#fcbc90"),
    ),
    ramp=("#1d2530", "#1d3f63", "#25659c", "#3f90cf", "#86bfe6", "#e3f1fb"),
    diverging=("#ffb454", "#9a6420", "#39424e", "#2d6ea8", "#7cc4ff"),
)


def colour_of(place: int) -> str:
    """The colour of a series, by name."""
    return f"theme:c{place % len(LIGHT.series)}"


def dash_of(place: int) -> list[int]:
    """Lengths of strokes and gaps in pixels."""
    return list(DASHES[place % len(DASHES)])


def coloured(spec: dict[str, Any], theme: Theme) -> dict[str, Any]:
    """A specification with the colours of a theme in place of their names."""
    colours = theme.colours()
    named: dict[str, Any] = json.loads(
        re.sub(r'"theme:(\w+)"', lambda name: json.dumps(colours[name[1]]), json.dumps(spec))
    )
    return named


def config() -> dict[str, Any]:
    """Vega-Lite's configuration: quiet axes, one font, legends below, colours by name."""
    text = {
        "labelColor": "theme:muted",
        "titleColor": "theme:muted",
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 12,
    }
    return {
        "background": "theme:face",
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
        "view": {"stroke": None},
        "axis": {
            **text,
            "labelLimit": 180,
            "gridColor": "theme:grid",
            "domainColor": "theme:muted",
            "tickColor": "theme:muted",
            "labelOverlap": "greedy",
            "labelSeparation": 8,
            "labelFlush": False,  # a label that is moved inwards touches its neighbour
            "tickCount": 5,
        },
        # the label at the end of an axis is wider than its tick
        "padding": {"left": 5, "top": 5, "right": 16, "bottom": 5},
        "range": {"ramp": "theme:ramp", "diverging": "theme:diverging"},
        "legend": {
            **text,
            "orient": "bottom",
            "columns": 3,
            "labelLimit": 200,
            "titleLimit": 300,
            "symbolStrokeWidth": 2,
            "symbolOpacity": 1,
        },
        "title": {"color": "theme:ink", "fontSize": 13, "anchor": "start", "offset": 10},
        "text": {"color": "theme:ink"},
    }
