"""A page: what it may do, how large it is, and what it says of its charts."""

import re
from pathlib import Path

import pandas as pd
import pytest

from lightfed.drawing import library
from lightfed.drawing.charts import Figure
from lightfed.drawing.library import digest
from lightfed.drawing.markup import _column, content, document
from tests.drawing.test_marks import CHARTS, FIGURE, METHODS

SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def page(**also: object) -> str:
    finals = pd.DataFrame({"run": ["a <b>"], "accuracy": ["1 +- 2"]})
    parts = {"lead": [], "finals": finals, "places": [0], "tables": [], "verdicts": []}
    return document(
        "Some <runs>", template="comparison.html", figures=[FIGURE], **{**parts, **also}
    )


def test_only_the_pages_two_scripts_may_run_and_nothing_is_fetched() -> None:
    text = page()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    policy = policy.replace("&#39;", "'")
    (script,) = SCRIPT.findall(text)
    allowed = f"script-src '{digest(script.encode())}' '{library.library().digest}'"
    assert policy.split("; ")[:2] == ["default-src 'none'", allowed]
    assert not re.search(r"<(link|iframe|object|img)|\bsrc=|\bhref=|@import|url\(", text)
    assert "a &lt;b&gt;" in text
    assert METHODS[1] not in text


def test_a_page_of_every_mark_is_small() -> None:
    text = page()
    packed = len(library.library().packed)
    assert len(text) - packed < 120_000
    assert len(text) < 1_000_000


def test_the_library_is_kept_and_a_broken_copy_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_bundle", lambda: bundles.append(1) or b"vega" * 99)
    made = library.library.__wrapped__
    assert made() == made()
    assert len(bundles) == 1
    (kept,) = (tmp_path / "lightfed").iterdir()
    kept.write_bytes(kept.read_bytes()[:20])
    assert made().digest == digest(b"vega" * 99)
    assert len(bundles) == 2


def test_without_a_place_for_it_the_library_is_bundled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lightfed").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_bundle", lambda: b"vega")
    assert library.library.__wrapped__().digest == digest(b"vega")


def test_data_are_columns_with_names_once_and_numbers_short() -> None:
    (lines,) = content(Figure("lines", "Lines", (CHARTS["lines"](),)))
    assert lines["data"]["series"]["of"] == list(METHODS)
    assert lines["data"]["y"][0] == 0.52
    assert lines["data"]["x"][:3] == [1, 2, 3]


def test_names_that_repeat_are_counted() -> None:
    table = pd.DataFrame({"run": ["b"] * 5 + ["a"] * 4, "by turns": [*"abababab", "c"]})
    assert _column(table["run"]) == {"of": ["b", "a"], "at": [0, 1], "times": [5, 4]}
    assert _column(table["by turns"])["at"] == [0, 1] * 4 + [2]


def test_a_live_page_loads_itself_again() -> None:
    assert 'http-equiv="refresh" content="20"' in page(refresh=20)
    assert "refresh" not in SCRIPT.sub("", page())


def test_every_chart_is_described_and_every_series_has_a_button() -> None:
    text = page()
    assert text.count('role="img"') == len(FIGURE.charts)
    assert text.count('aria-pressed="true"') == len(METHODS)
    assert text.count("<details") == 1
