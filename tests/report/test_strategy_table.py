"""The table of strategies and versions in the terminal, on the page and as a csv file."""

import csv
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lightfed.report import compare
from lightfed.results.run import Run
from lightfed.studies.flexifed.strategies import studies
from lightfed.studies.flexifed.strategy_table import StrategyTable, print_strategies
from lightfed.utils.errors import UserError
from tests.report.make_run import rows_of
from tests.report.make_study import strategy_run
from tests.report.read_page import ReadPage

STEPS = (0.0, 0.1)  # V2 lies so much above V1
DEVIATION = float(np.std([0, 0.1], ddof=1))  # of the two seeds
STRATEGIES = ["Clustered-FL", "Max-Common"]


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Two seeds of two strategies with two versions, a limit, and a data set with one version."""
    two: dict[str, Any] = {"versions": (11, 13), "steps": STEPS}
    courses = {"ClusteredFL": (0.3, 0.5), "MaxCommon": (0.5, 0.7)}
    found = [
        strategy_run(tmp_path, name, np.add(course, 0.1 * seed), seed=seed, **two)
        for name, course in courses.items()
        for seed in (0, 1)
    ]
    options = {"max_common_layers": 2}
    found.append(strategy_run(tmp_path, "MaxCommon", (0.2, 0.4), name="l2", options=options, **two))
    other: dict[str, Any] = {
        "data": "AGNews",
        "setting": "layers",
        "family": "CharCNN",
        "versions": (3,),
    }
    found.append(strategy_run(tmp_path, "BasicCommon", (0.1, 0.25), name="text", **other))
    return found


def _table(runs: list[Run], asked: float | None = None) -> StrategyTable:
    return StrategyTable(studies(runs), asked)


def _page(table: StrategyTable, folder: Path) -> ReadPage:
    """What a page says, without its pictures."""
    path = folder / "table.html"
    path.write_text("".join(table.markup()), "utf-8")
    return ReadPage(path)


def test_the_terminal_has_a_row_per_setting_and_strategy(runs: list[Run]) -> None:
    text = _table(runs).text(spread=True)
    versions = ("V1", "V2", "mean")
    assert tuple(text.columns) == ("setting", "strategy", *versions, "target", "rounds", "speed")
    first, second = (
        [f"{value:.2f} +- {100 * DEVIATION:.2f}" for value in values]
        for values in ((50, 60, 55), (70, 80, 75))
    )
    assert rows_of(text) == (
        ("CIFAR10, VGG", "Clustered-FL", *first, "55.00", "2", "1.00"),
        ("", "Max-Common", *(f"*{cell}" for cell in second), "55.00", "1", "2.00"),
        ("CIFAR10, VGG;", "Max-Common", "35.00", "45.00", "40.00", "55.00", "-", "-"),
        ("max_common_layers 2", "", "", "", "", "", "", ""),
        ("AGNews, CharCNN", "Basic-Common", "25.00", "-", "25.00", "-", "-", "-"),
    )


@pytest.mark.parametrize(("width", "there"), [(69, False), (75, True)])
def test_deviations_are_reported_where_there_is_room(
    runs: list[Run], width: int, there: bool
) -> None:
    written = StringIO()
    print_strategies(Console(file=written, width=width), _table(runs))
    (line,) = [line for line in written.getvalue().splitlines() if "*70.00" in line]
    assert ("*80.00 +-" in line, "*80.00" in line) == (there, True)
    assert "has a star" in " ".join(written.getvalue().split())


def test_the_page_has_a_row_per_setting_and_strategy(runs: list[Run], tmp_path: Path) -> None:
    page = _page(_table(runs), tmp_path)
    rows = next(found for found in page.cells if found[0][0] == "setting")
    columns = ["setting", "strategy", "V1", "V2", "mean", "target", "rounds", "speed"]
    assert rows[0] == columns
    vgg = "CIFAR10, VGG"
    names = [(vgg, name) for name in STRATEGIES]
    names += [(f"{vgg}; max_common_layers 2", "Max-Common"), ("AGNews, CharCNN", "Basic-Common")]
    assert [tuple(row[:2]) for row in rows[1:]] == names
    assert [row[3].startswith("*80.00") for row in rows[1:]] == [False, True, False, False]
    assert [row[-1] for row in rows[1:]] == ["1.00", "2.00", "-", "-"]
    assert "V1 and so on: VGG 11, 13; CharCNN 3." in page.texts["p"]


def test_the_notes_tell_the_target(runs: list[Run]) -> None:
    measured = "in personal accuracy (resolution 1 round)."
    stated = _table(runs).notes()[-1]
    assert stated.endswith(f"Target: what Clustered-FL reached in the end, {measured}")
    assert _table(runs, 0.6).notes()[-1].endswith(f"Target: 0.6, {measured}")


def test_the_csv_file_has_every_figure(runs: list[Run]) -> None:
    rows = list(csv.DictReader(StringIO(_table(runs, 0.6).csv())))
    found = {(row["setting"], row["strategy"], row["version"]): row for row in rows}
    assert len(found) == len(rows) == 3 * 3 + 2
    mean = found["", "Max-Common", "mean"]
    names = [mean[key] for key in ("data", "family", "model", "seeds")]
    assert names == ["CIFAR10", "VGG", "", "2"]
    figures = [float(mean[key]) for key in ("mean", "std", "target", "rounds", "resolution")]
    np.testing.assert_allclose(figures, [0.75, DEVIATION, 0.6, 2, 1])
    assert mean["speed"] == ""  # Clustered-FL ends at 0.55
    second = found["max_common_layers 2", "Max-Common", "V2"]
    assert (second["model"], second["std"], second["target"]) == ("13", "", "")
    assert float(second["mean"]) == pytest.approx(0.45)
    speeds = [row["speed"] for row in csv.DictReader(StringIO(_table(runs).csv()))]
    assert speeds == ["", "", "1.0", "", "", "2.0", *[""] * 5]


def test_the_csv_file_has_no_line_for_a_version_that_nobody_has(tmp_path: Path) -> None:
    runs = [
        strategy_run(tmp_path, "MaxCommon", (0.5, 0.6), name=str(versions), versions=versions)
        for versions in ((11, 13), (13,))
    ]
    rows = list(csv.DictReader(StringIO(_table(runs).csv())))
    assert [row["version"] for row in rows] == ["V1", "V2", "mean", "V2", "mean"]


def test_a_comparison_writes_the_file_and_removes_one_of_other_runs(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ReadPage(compare([run.folder for run in runs], target=0.6))
    assert "Strategies by version" in page.texts["h2"]
    written = (tmp_path / "comparison" / "comparison-strategies.csv").read_text()
    assert written == _table(runs, 0.6).csv()
    assert "Max-Common" in capsys.readouterr().out
    others = [strategy_run(tmp_path, "FedAvg", (0.5, 0.6), seed=seed) for seed in (0, 1)]
    page = ReadPage(compare([run.folder for run in others]))
    assert not (tmp_path / "comparison" / "comparison-strategies.csv").exists()
    assert "Strategies by version" not in page.texts["h2"]
    assert "Standalone" not in capsys.readouterr().out


@pytest.mark.parametrize("target", [80.0, 0.0, -0.5, float("nan"), float("inf")])
def test_a_target_that_is_no_accuracy_is_refused(runs: list[Run], target: float) -> None:
    with pytest.raises(UserError, match=r"^--target: .*; give an accuracy in 0..1, such as 0.8"):
        compare([run.folder for run in runs], target=target)


def test_a_target_of_another_metric_is_any_number(tmp_path: Path) -> None:
    courses = {"ClusteredFL": (9.0, 5.0), "MaxCommon": (6.0, 3.0)}
    runs = [strategy_run(tmp_path, n, c, metric="perplexity") for n, c in courses.items()]
    with pytest.raises(UserError, match=r"^--target: inf; give a finite number"):
        compare([run.folder for run in runs], target=float("inf"))
    page = _page(_table(runs, 6.0), tmp_path)
    assert "Final perplexity:" in page.texts["p"]
    (wide,) = [rows for rows in page.cells if rows[0][0] == "setting"]
    assert [row[-1] for row in wide[1:]] == ["1.00", "2.00"]
