"""FlexiFed's strategies: protocols and speeds, the table by version, and their courses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.drawing.marks import Figure
from lightfed.report import compare
from lightfed.results.run import Run
from lightfed.studies.figures import study_figures
from lightfed.studies.flexifed import figures, tables
from lightfed.studies.shared import StudyTable
from lightfed.utils.errors import UserError
from tests.report.make_run import by_title, drawn, rows_of
from tests.report.make_study import strategy_run
from tests.report.read_page import ReadPage

FLAT = (0.5, 0.5)
COURSES = {
    "MaxCommon": (0.5, 0.8, 0.9, 0.9),
    "BasicCommon": (0.3, 0.5, 0.5, 0.6),
    "ClusteredFL": (0.2, 0.4, 0.6, 0.8),
    "Standalone": (0.1, 0.2, 0.3, 0.4),
}  # the folders' order is not the paper's
STRATEGIES = ["Standalone", "ClusteredFL", "BasicCommon", "MaxCommon"]


@pytest.fixture
def row(tmp_path: Path) -> list[Run]:
    """One protocol."""
    return [strategy_run(tmp_path, name, course) for name, course in COURSES.items()]


def _table(runs: list[Run], target: float | None = None) -> StudyTable:
    (found,) = tables(runs, target=target)
    return found


def _names(runs: list[Run]) -> dict[str, list[str]]:
    """The strategies of each protocol."""
    return {
        table.title.removesuffix(": strategies by version"): table.cells["method"].tolist()
        for table in tables(runs)
    }


def _cells(runs: list[Run], strategy: str, target: float | None = None) -> list[str]:
    """Rounds, bytes and FLOPs to the target, and speed."""
    cells = _table(runs, target).cells.set_index("method").loc[strategy]
    return [str(cell) for cell in cells.iloc[-4:]]


def _stars(runs: list[Run], version: str = "all clients") -> list[str]:
    table = _table(runs).cells
    return table["method"][table[version].str.startswith("*")].tolist()


@pytest.mark.parametrize(
    ("strategy", "target", "expected"),
    [
        ("MaxCommon", None, ("2", "2")),
        ("ClusteredFL", None, ("4", "1")),
        ("Standalone", None, ("-", "-")),
        ("MaxCommon", 0.5, ("1", "3")),
        ("BasicCommon", 0.5, ("2", "1.5")),
        ("MaxCommon", 0.85, ("3", "-")),  # ClusteredFL did not get there
    ],
)
def test_the_speed_is_the_ratio_of_rounds_to_the_target(
    row: list[Run], strategy: str, target: float | None, expected: tuple[str, str]
) -> None:
    rounds, *_, speed = _cells(row, strategy, target)
    assert (rounds, speed) == expected
    heading = _table(row, target).cells.columns[-4]
    goal = f"{100 * (target or 0.8):.2f}"
    assert heading == f"rounds to {goal} % personal accuracy, resolution 1 round"


def test_rounds_are_a_mean_over_seeds_that_all_got_there(tmp_path: Path) -> None:
    courses = {
        "ClusteredFL": ((0.1, 0.3, 0.4), (0.3, 0.5, 0.6)),  # all reach 0.4, in rounds 3 and 2
        "MaxCommon": ((0.2, 0.6, 0.7), (0.6, 0.4, 0.9)),  # in rounds 2 and 1
    }
    runs = [
        strategy_run(tmp_path, name, course, seed=seed)
        for name, pair in courses.items()
        for seed, course in enumerate(pair)
    ]
    assert _cells(runs, "MaxCommon")[::3] == ["1.5", "1.667"]
    assert _cells(runs, "MaxCommon", 0.8)[::3] == ["-", "-"]


def test_the_best_strategy_of_a_version_has_a_star(row: list[Run], tmp_path: Path) -> None:
    assert _stars(row) == _stars(row, "VGG-13") == ["MaxCommon"]
    assert _stars(row[:1]) == []  # alone, it is no better than others
    flat = [strategy_run(tmp_path / "flat", n, FLAT) for n in ("ClusteredFL", "MaxCommon")]
    assert _stars(flat, "VGG-19") == ["ClusteredFL", "MaxCommon"]
    courses = {"ClusteredFL": (9.0, 7.0, 5.0), "MaxCommon": (6.0, 5.0, 3.0)}
    low = [strategy_run(tmp_path / "l", n, c, metric="perplexity") for n, c in courses.items()]
    assert _stars(low) == ["MaxCommon"]
    assert _cells(low, "MaxCommon")[-1] == "1.5"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"batch_size": 32}, ["batch_size 64", "batch_size 32"]),
        ({"course": (0.5, 0.5, 0.5)}, ["max_epochs 2", "max_epochs 3"]),
        ({"counts": (3, 2, 2, 1)}, ["clients 0 count 2", "clients 0 count 3"]),
    ],
)
def test_protocols_are_named_by_what_tells_them_apart(
    tmp_path: Path, changes: dict[str, Any], names: list[str]
) -> None:
    usual = [strategy_run(tmp_path, name, FLAT) for name in ("Standalone", "MaxCommon")]
    other = strategy_run(tmp_path, "MaxCommon", **{"course": FLAT, "name": "other", **changes})
    found = _names([other, *usual])
    assert {name: len(own) for name, own in found.items()} == {
        f"CIFAR10, VGG, {name}": count for name, count in zip(names, (2, 1), strict=True)
    }


def test_data_partitions_and_numbers_of_clients_are_protocols(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"partition": "Shards"},
        {"counts": 6},
        {"data": "CINIC10", "family": "CIFARResNet"},
    ]
    runs = [
        strategy_run(tmp_path, name, FLAT, name=f"{name}{i}", **change)
        for i, change in enumerate(changes)
        for name in ("ClusteredFL", "MaxCommon")
    ]
    found = [*_names(runs)]
    assert len(found) == 4
    assert [("Shards" in name, "24" in name, "CINIC10" in name) for name in found] == [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


def test_arguments_of_a_strategy_and_seeds_share_a_protocol(row: list[Run]) -> None:
    root = row[0].folder.parent
    options = {"max_common_layers": 2}
    more = [
        strategy_run(root, "MaxCommon", (0.1, 0.8, 0.8, 0.8), name="l2", options=options),
        strategy_run(root, "ClusteredFL", COURSES["ClusteredFL"], seed=1),
    ]
    (names,) = _names([*row, *more]).values()
    assert names[:3] == STRATEGIES[:3]
    assert "MaxCommon, max_common_layers 2" in names
    assert _cells([*row, *more], "MaxCommon, max_common_layers 2")[-1] == "2"


def test_what_is_no_study(tmp_path: Path) -> None:
    alone = strategy_run(tmp_path, "Standalone", FLAT)
    fedavg = strategy_run(tmp_path, "FedAvg", FLAT)
    other = strategy_run(tmp_path, "MaxCommon", FLAT, name="no config", config=None)
    assert [*tables([alone, fedavg, other])] == []
    third = strategy_run(tmp_path, "ClusteredFL", FLAT, data="CINIC10")
    assert list(_names([alone, third])) == ["CINIC10, VGG"]


def test_the_table_has_a_row_per_strategy_and_a_column_per_version(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"versions": (11, 13), "steps": (0.0, 0.1)}
    courses = {"ClusteredFL": (0.3, 0.5), "MaxCommon": (0.5, 0.7)}
    runs = [
        strategy_run(tmp_path, name, np.add(course, 0.01 * seed), seed=seed, **changes)
        for name, course in courses.items()
        for seed in (0, 1)
    ]
    table = _table(runs)
    means = [f"{name} (95 % interval)" for name in ("all clients", "VGG-11", "VGG-13")]
    assert [*table.cells.columns[:4]] == ["method", *means]
    half = f"{100 * 12.706204736432095 * 0.005:.2f}"  # 95 % t interval of two seeds
    first, second = (
        [f"{value} +- {half} %" for value in values]
        for values in (("50.50", "45.50", "55.50"), ("*70.50", "*65.50", "*75.50"))
    )
    assert rows_of(table.cells) == (
        ("ClusteredFL", *first, "2", "-", "0 FLOPs", "1"),
        ("MaxCommon", *second, "1", "-", "0 FLOPs", "2"),
    )


def test_one_version_has_all_clients_alone(tmp_path: Path) -> None:
    one: dict[str, Any] = {"versions": (16,), "counts": 8, "stated": {"synthetic": True}}
    runs = [strategy_run(tmp_path, n, COURSES[n], **one) for n in ("ClusteredFL", "MaxCommon")]
    (figure,) = figures(runs)
    assert list(by_title(figure)) == ["All clients"]
    assert figure.title.endswith("(synthetic data)")
    table = _table(runs)
    assert table.title.endswith("(synthetic data)")
    assert tuple(table.cells.columns[:2]) == ("method", "all clients")
    assert len(table.cells.columns) == 6


def test_a_comparison_shows_and_writes_the_table(
    row: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ReadPage(compare([run.folder for run in row], target=0.6, tables=["csv", "latex"]))
    assert "CIFAR10, VGG: strategies by version" in page.texts["h2"]
    assert page.table("method")["MaxCommon"]["speed"] == "1.5"
    assert "rounds to 60.00 %" in capsys.readouterr().out
    written = (tmp_path / "comparison" / "strategies-by-version-cifar10-vgg.csv").read_text()
    assert written.splitlines()[0].startswith("method,all clients,VGG-11,")
    assert [line.partition(",")[0] for line in written.splitlines()[1:]] == STRATEGIES
    assert (tmp_path / "comparison" / "strategies-by-version-cifar10-vgg.tex").exists()


@pytest.mark.parametrize("target", [80.0, 0.0, -0.5, float("nan"), float("inf")])
def test_a_target_that_is_no_accuracy_is_refused(row: list[Run], target: float) -> None:
    with pytest.raises(UserError, match=r"^--target: .*; give an accuracy in 0..1, such as 0.8"):
        compare([run.folder for run in row], target=target)


def test_a_target_of_another_metric_is_any_number(tmp_path: Path) -> None:
    courses = {"ClusteredFL": (9.0, 5.0), "MaxCommon": (6.0, 3.0)}
    runs = [strategy_run(tmp_path, n, c, metric="perplexity") for n, c in courses.items()]
    with pytest.raises(UserError, match=r"^--target: inf; give a finite number"):
        compare([run.folder for run in runs], target=float("inf"))
    table = _table(runs, 6.0).cells
    assert "rounds to 6 personal perplexity, resolution 1 round" in table
    assert table["speed"].tolist() == ["1", "2"]


def test_each_strategy_has_a_line_for_all_clients_and_for_each_version(row: list[Run]) -> None:
    (figure,) = figures(row)
    charts = by_title(figure)
    assert list(charts) == ["All clients", "VGG-11", "VGG-13", "VGG-16", "VGG-19"]
    assert list(figure.series) == STRATEGIES
    assert drawn(charts["All clients"])["MaxCommon"][:2] == [(1, 0.5), (2, 0.8)]
    assert drawn(charts["VGG-19"])["MaxCommon"][:2] == [(1, 0.515), (2, 0.815)]
    assert figure.title == "CIFAR10, VGG: accuracy by strategy"


def test_protocols_have_figures_of_their_own(row: list[Run], tmp_path: Path) -> None:
    more = [
        strategy_run(tmp_path, name, COURSES[name], **changes)
        for name in ("ClusteredFL", "MaxCommon")
        for changes in (
            {"name": f"{name}-shards", "partition": "Shards"},
            {"name": f"{name}-cinic", "data": "CINIC10", "family": "CIFARResNet"},
        )
    ]
    found: list[Figure] = study_figures([*row, *more])
    assert [figure.name for figure in found] == [
        "strategies-cifar10-iid-vgg",
        "strategies-cifar10-shards-vgg",
        "strategies-cinic10-iid-cifarresnet",
    ]
