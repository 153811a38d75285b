"""Colours and dashes of all charts and pages, for light and dark screens: templates/theme.json.

A chart names its colours (`theme:ink`, `theme:c0`), and `coloured` puts in those of a scheme. So a
page follows the reader's screen, and a file for a paper is light. Series colours have a contrast of
at least 3:1 with the background, texts one of at least 4.5:1 (WCAG 2.2 AA). They were chosen for
the largest distance in OKLab under normal vision and the three colour vision deficiencies of
Machado et al., "A Physiologically-based Model for Simulation of Color Vision Deficiency", TVCG
2009; dashes tell series apart where colours repeat or are printed in grey. `config` is that of
Vega-Lite; the padding on the right is for the label at the end of an axis, wider than its tick.
"""

import json
import re
from importlib.resources import files
from typing import Any

THEME = json.loads((files("lightfed.drawing") / "templates" / "theme.json").read_text("utf-8"))


def colour_of(place: int) -> str:
    """The colour of a series, by name."""
    return f"theme:c{place % len(THEME['light']['series'])}"


def dash_of(place: int) -> list[int]:
    """Lengths of strokes and gaps in pixels."""
    lengths: list[int] = THEME["dashes"][place % len(THEME["dashes"])]
    return lengths


def coloured(spec: dict[str, Any], scheme: str) -> dict[str, Any]:
    """A specification with the colours of a scheme, `light` or `dark`, in place of their names."""
    colours = THEME[scheme] | {f"c{i}": name for i, name in enumerate(THEME[scheme]["series"])}
    text = re.sub(r'"theme:(\w+)"', lambda name: json.dumps(colours[name[1]]), json.dumps(spec))
    named: dict[str, Any] = json.loads(text)
    return named
