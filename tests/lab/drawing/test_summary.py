"""The tables in the terminal."""

import re
from pathlib import Path

import pytest

from lightfed.lab.report.page import build, print_summary
from tests.lab.report.make_run import ENVIRONMENT, write_run


def _cells(text: str) -> dict[str, list[str]]:
    """First cell of each line -> the other cells; cells are two blanks or more apart."""
    rows = [
        [cell.strip() for cell in line.strip().split("  ") if cell.strip()]
        for line in text.splitlines()
    ]
    return {row[0]: row[1:] for row in rows if row}


def test_the_summary_holds_the_final_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(write_run(tmp_path / "run"))
    rows = _cells(capsys.readouterr().out)
    headline = "known: HeteroFL on Digits, 4 clients in 2 groups, 3 rounds, seed 7, 2 ranks"
    assert f"{headline}, 1 of 12 sessions skipped" in rows
    assert rows["global accuracy"] == ["75.00 %", "best 75.00 % in round 3"]
    assert rows["a"] == ["2", "90.00 %", "80.00 %", "1.00 kB", "4.00 GFLOPs"]
    assert rows["b"] == ["2", "40.00 %", "30.00 %", "500 B", "2.00 GFLOPs"]


def test_the_last_line_is_the_path_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / ("long" * 40))
    print_summary(folder)
    assert "page:" not in capsys.readouterr().out
    build(folder)
    print_summary(folder)
    assert capsys.readouterr().out.endswith(f"\npage: {folder}/index.html\n")


def test_a_bracket_in_a_name_is_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(1, 0, "[red]x[/red]", 3, 0.5, 1, 1, 1, 1)]
    environment = {**ENVIRONMENT, "name": "[bold]n", "synthetic": True}
    print_summary(write_run(tmp_path / "run", environment=environment, evaluations=rows))
    text = capsys.readouterr().out
    assert text.startswith("[bold]n: HeteroFL")
    assert "[red]x[/red]" in _cells(text)
    assert "synthetic data" in text


def test_a_narrow_terminal_breaks_no_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard output for a terminal
    monkeypatch.setenv("COLUMNS", "66")
    monkeypatch.setenv("NO_COLOR", "1")
    print_summary(write_run(tmp_path / "run"))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = printed.splitlines()
    row = next(line for line in lines if line.strip().startswith("a "))
    assert row.split() == ["a", "2", "90.00", "%", "80.00", "%", "1.00", "kB", "4.00", "GFLOPs"]
    # Rows of tables begin with a blank; sentences are not broken.
    assert max(len(line) for line in lines if line.startswith(" ")) <= 66
