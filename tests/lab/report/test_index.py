"""The list of the runs in a folder."""

from pathlib import Path

import pytest

from lightfed.lab.compare import main as compare
from lightfed.lab.report.page import build
from tests.lab.report.make_run import ENVIRONMENT, write_run
from tests.lab.report.read_page import ReadPage


def test_the_runs_of_a_folder_are_listed_with_their_pages(tmp_path: Path) -> None:
    for name, rounds in (("a run", 3), ("b", 9)):
        stated = {**ENVIRONMENT, "name": name, "rounds": rounds}
        build(write_run(tmp_path / name, environment=stated))
    write_run(tmp_path / "no page")
    (tmp_path / "empty").mkdir()
    build(tmp_path / "b")
    page = ReadPage(tmp_path / "index.html")
    rows = page.table("run")
    assert {name: row["state"] for name, row in rows.items()} == {
        "a run": "finished", "b": "not finished", "no page": "finished"
    }  # fmt: skip
    del rows["b"]["changed"]
    assert rows["b"] == {
        "run": "b",
        "algorithm": "HeteroFL",
        "data": "Digits",
        "seed": "7",
        "rounds": "3 of 9",
        "final figure": "75.00 % global accuracy",
        "state": "not finished",
    }
    assert sorted(page.resources) == ["a%20run/index.html", "b/index.html"]
    assert "script" not in page.tags
    assert len(page.source) < 10_000


def test_a_page_of_something_else_stays(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("mine")
    build(write_run(tmp_path / "run"))
    assert (tmp_path / "index.html").read_text() == "mine"


def test_the_list_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        build(write_run(tmp_path / f"run{seed}", environment=ENVIRONMENT | {"seed": seed}))
    assert compare([*map(str, sorted(tmp_path.glob("[!.]*")))]) == 0
    assert "skipped runs" not in capsys.readouterr().out
