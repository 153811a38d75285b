"""A page: what it may do, how large it is, and what it says of its charts."""

import gzip
import re
from pathlib import Path

import pandas as pd
import pytest

from lightfed.lab.drawing.marks import Figure
from lightfed.lab.drawing.markup import content, digest, document, library
from tests.lab.drawing.test_marks import CHARTS, FIGURE, METHODS

SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def page(**also: object) -> str:
    finals = pd.DataFrame({"run": ["a <b>"], "accuracy": ["1 +- 2"]})
    parts = {"lead": [], "finals": finals, "places": [0], "tables": [], "search": None}
    parts |= {"differences": None}
    return document(
        "Some <runs>", template="comparison.html", figures=[FIGURE], **{**parts, **also}
    )


def test_only_the_pages_two_scripts_may_run_and_nothing_is_fetched() -> None:
    text = page()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    policy = policy.replace("&#39;", "'")
    (script,) = SCRIPT.findall(text)
    packed = digest(gzip.decompress(library()))
    allowed = f"script-src '{digest(script.encode())}' '{packed}'"
    assert policy.split("; ")[:2] == ["default-src 'none'", allowed]
    assert not re.search(r"<(link|iframe|object|img)|\bsrc=|\bhref=|@import|url\(", text)
    assert "a &lt;b&gt;" in text
    assert METHODS[1] not in text


def test_a_page_of_every_mark_is_small() -> None:
    text = page()
    assert len(text) - len(library()) * 4 // 3 < 120_000
    assert len(text) < 1_000_000


@pytest.mark.parametrize("kept", [True, False])
def test_the_library_is_bundled_once_where_there_is_a_place_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    bundles = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        "vl_convert.javascript_bundle", lambda text, **_: bundles.append(text) or "vega"
    )
    if not kept:
        (tmp_path / "lightfed").write_text("no folder")
    assert gzip.decompress(library()) == gzip.decompress(library()) == b"vega"
    assert len(bundles) == (1 if kept else 2)


def test_data_are_rows_with_short_numbers() -> None:
    (lines,) = content(Figure("lines", "Lines", (CHARTS["lines"](),)))
    table = pd.DataFrame(lines["data"]["data"], columns=lines["data"]["columns"])
    assert set(table["series"]) == set(METHODS)
    assert table["y"][0] == 0.52
    assert table["x"][:3].tolist() == [1, 2, 3]


def test_every_chart_is_described_and_every_series_has_a_button() -> None:
    text = page()
    assert text.count('role="img"') == len(FIGURE.charts)
    assert text.count('aria-pressed="true"') == len(METHODS)
    assert text.count("<details") == 1
