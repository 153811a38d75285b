"""Charts hold Vega-Lite's schema, with the colours of both themes, and become files."""

import re
from collections.abc import Callable, Mapping

import altair
import numpy as np
import pandas as pd
import pytest

from lightfed.lab.drawing import marks
from lightfed.lab.drawing.files import TABLES, picture, table_text
from lightfed.lab.drawing.marks import THEME, Axis, Chart, Figure, coloured, metric_axis

METHODS = ("FedAvg", "<script>alert(1)</script>", "a.b[c] $x$ 50 %")
TABLE = pd.DataFrame(
    [
        {"round": t, "series": method, "acc": mean, "low": mean - 0.02, "high": mean + 0.02}
        for i, method in enumerate(METHODS)
        for t in range(1, 6)
        for mean in [0.5 + 0.02 * t + 0.1 * i]
    ]
)
LAST = TABLE[TABLE["round"] == 5]
PLACES = {name: place for place, name in enumerate(METHODS)}
ROUND, ACC, METHOD = Axis("round"), Axis("acc", "accuracy", ".4~%"), Axis("series", "method")
SCHEMES = ("light", "dark")
CELLS = pd.DataFrame(np.arange(120).reshape(12, 10)).rename_axis("client")
CHARTS: Mapping[str, Callable[[], Chart]] = {
    "lines": lambda: marks.lines(TABLE, ROUND, ACC, PLACES),
    "points": lambda: marks.points(TABLE, ROUND, ACC, PLACES),
    "named": lambda: marks.points(LAST, ROUND, ACC, PLACES, name="series"),
    "spread": lambda: marks.spread(TABLE, ACC, METHOD, PLACES),
    "heat": lambda: marks.heat(CELLS, "label", Axis("n", "samples")),
}
# Machado, Oliveira, Fernandes 2009, table 1, severity 1, on linear RGB
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
FIGURE = Figure("all", "All marks", tuple(draw() for draw in CHARTS.values()))


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_is_vega_lite_in_both_themes(name: str) -> None:
    chart = CHARTS[name]()
    for scheme in SCHEMES:
        page = {**chart.spec, "config": THEME["config"], "data": {"values": []}}
        spec = coloured(page, scheme)
        assert "theme:" not in str(spec)
        altair.LayerChart.from_dict(spec)  # raises where the schema does not hold
    assert len(chart.table.columns) == len(chart.columns) > 1


def test_a_figure_is_drawn_with_the_names_as_texts() -> None:
    svg = picture(FIGURE, "svg").decode()
    assert svg.startswith("<svg")
    assert svg.count("&lt;script&gt;") > 5  # in legends and on axes
    assert "<script" not in svg
    assert list(FIGURE.series) == list(METHODS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_texts_and_series_have_the_contrast_of_aa(scheme: str) -> None:
    theme = THEME[scheme]
    for text in (theme["ink"], theme["muted"], theme["accent"]):
        assert min(contrast(text, theme["face"]), contrast(text, theme["page"])) >= 4.5
    for colour in theme["series"]:
        assert contrast(colour, theme["face"]) >= 3


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_two_colours_stay_apart(scheme: str, deficiency: str) -> None:
    series = map(_linear, THEME[scheme]["series"])
    seen = [_lab(np.array(DEFICIENCIES[deficiency]) @ colour) for colour in series]
    apart = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(apart) > 14  # CIE76; some 2 is a just noticeable difference


def test_a_name_has_one_colour_and_one_dash_in_every_chart() -> None:
    few = TABLE[TABLE["series"] != METHODS[0]]
    whole, part = (
        marks.lines(table, ROUND, ACC, PLACES).spec["layer"][1] for table in (TABLE, few)
    )
    for channel in ("color", "strokeDash"):
        scales = [layer["encoding"][channel]["scale"] for layer in (whole, part)]
        assert scales[0]["domain"] == list(METHODS)
        for key in ("domain", "range"):
            assert scales[1][key] == scales[0][key][1:]


def test_a_long_line_and_a_large_group_are_bounded() -> None:
    n = 20_000
    many = pd.DataFrame({"round": range(n), "acc": np.linspace(0, 1, n), "series": "FedAvg"})
    line = marks.lines(many, ROUND, ACC, PLACES).data
    assert len(line) <= marks.MOST_ROUNDS
    assert line["x"].iloc[-1] == n - 1
    spread = marks.spread(many, ACC, METHOD, PLACES).data
    assert len(spread) <= marks.MOST_SHOWN
    quartiles = spread["x"].quantile([0, 0.25, 0.5, 0.75, 1])
    assert quartiles.tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=1e-3)


def test_a_long_name_does_not_stand_beside_a_point() -> None:
    short = pd.DataFrame({"series": ["a, b", "c"], "acc": [0.5, 0.6], "x": [1.0, 2.0]})
    long = short.assign(series=["FedAvg, rounds 10, learning rate 0.1", "FedAvg, rounds 24"])
    names = [*short["series"], *long["series"]]
    places = {name: place for place, name in enumerate(names)}
    pairs = [marks.points(one, Axis("x"), ACC, places, name="series") for one in (short, long)]
    assert [len(chart.spec["layer"]) for chart in pairs] == [2, 1]


def test_values_that_are_not_finite_are_no_marks() -> None:
    table = TABLE.assign(acc=TABLE["acc"].where(TABLE["round"] != 2, np.inf))
    assert 2 not in set(marks.lines(table, ROUND, ACC, PLACES).data["x"])


def test_a_loss_over_decades_has_a_log_axis_and_a_share_per_cent() -> None:
    wide = pd.Series([100.0, 1.0, 0.1])
    assert metric_axis("loss", "loss", wide).log
    assert not metric_axis("loss", "loss", wide - 1).log
    assert metric_axis("acc", "val/acc", wide).format == ".4~%"


@pytest.mark.parametrize("kind", TABLES)
def test_tables_escape_names_and_shorten_numbers(kind: str) -> None:
    names = ["a|b_1", r"50 % & $x$ #{~^\}", "1 +- 2"]
    text = table_text(pd.DataFrame({"run": names, "n": [1.23456789, np.nan, 1.0]}), kind)
    expected = {
        "csv": "a|b_1,1.23456789",
        "markdown": r"| a\|b_1 | 1.23456789 |",
        "latex": r"a|b\_1 & 1.2346 \\" + "\n" + r"50 \% \& \$x\$ \#\{"
        r"\textasciitilde \textasciicircum \textbackslash \} &  \\" + "\n" + r"1 $\pm$ 2",
    }
    assert expected[kind] in text


def contrast(one: str, other: str) -> float:
    """Of two colours, by WCAG 2.2."""
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    return float(_linear(colour) @ np.array([0.2126, 0.7152, 0.0722]))


def _linear(colour: str) -> np.ndarray:
    parts = np.array([int(part, 16) for part in re.findall("[0-9a-f]{2}", colour)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear.clip(0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
