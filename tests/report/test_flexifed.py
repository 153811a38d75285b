"""FlexiFed's strategies: settings and speeds, the table by version, and their figures."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.drawing.charts import Chart, Figure
from lightfed.report import compare
from lightfed.results.run import Run
from lightfed.studies.figures import study_figures
from lightfed.studies.flexifed import figures, notes, shown, strategy_table
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
PACE = ["target", "rounds", "speed"]


@pytest.fixture
def row(tmp_path: Path) -> list[Run]:
    """One setting."""
    return [strategy_run(tmp_path, name, course) for name, course in COURSES.items()]


def _names(runs: list[Run]) -> dict[str, list[str]]:
    """The strategies of each setting."""
    table = strategy_table(runs)
    return table.groupby("setting", sort=False)["strategy"].unique().map(list).to_dict()


def _mean(runs: list[Run], strategy: str, asked: float | None = None, setting: str = "") -> Any:
    """The row of a strategy over all clients."""
    table = strategy_table(runs, asked).query("version == 'mean'")
    return table.set_index(["setting", "strategy"]).loc[(setting, strategy)]


def _stars(runs: list[Run], version: str = "mean") -> list[str]:
    table = shown(strategy_table(runs))
    return table["strategy"][table[version].str.startswith("*")].tolist()


@pytest.mark.parametrize(
    ("strategy", "asked", "expected"),
    [
        ("Max-Common", None, (0.8, 2, 2)),
        ("Clustered-FL", None, (0.8, 4, 1)),
        ("Standalone", None, (0.8, np.nan, np.nan)),
        ("Max-Common", 0.5, (0.5, 1, 3)),
        ("Basic-Common", 0.5, (0.5, 2, 1.5)),
        ("Max-Common", 0.85, (0.85, 3, np.nan)),  # Clustered-FL did not get there
    ],
)
def test_the_speed_is_the_ratio_of_rounds_to_the_target(
    row: list[Run], strategy: str, asked: float | None, expected: tuple[float, ...]
) -> None:
    found = _mean(row, strategy, asked)[PACE].astype(float)
    np.testing.assert_allclose(found, expected)


def test_the_speed_is_that_of_the_mean_over_the_seeds(tmp_path: Path) -> None:
    courses = {
        "ClusteredFL": ((0.1, 0.3, 0.4), (0.3, 0.5, 0.6)),  # the mean reaches 0.5 in round 3
        "MaxCommon": ((0.2, 0.6, 0.7), (0.6, 0.4, 0.9)),  # the mean is 0.4, 0.5, 0.8
    }
    runs = [
        strategy_run(tmp_path, name, course, seed=seed)
        for name, pair in courses.items()
        for seed, course in enumerate(pair)
    ]
    found = _mean(runs, "Max-Common")[["mean", "std", *PACE]].astype(float)
    np.testing.assert_allclose(found, (0.8, np.std([0.7, 0.9], ddof=1), 0.5, 2, 1.5))


def test_the_best_of_a_setting_and_version_has_a_star(row: list[Run], tmp_path: Path) -> None:
    assert _stars(row) == _stars(row, "V2") == ["Max-Common"]
    assert _stars(row[:1]) == []  # alone, it is no better than others
    flat = [strategy_run(tmp_path / "flat", n, FLAT) for n in ("ClusteredFL", "MaxCommon")]
    assert _stars(flat, "V4") == ["Clustered-FL", "Max-Common"]
    courses = {"ClusteredFL": (9.0, 7.0, 5.0), "MaxCommon": (6.0, 5.0, 3.0)}
    low = [strategy_run(tmp_path / "l", n, c, metric="perplexity") for n, c in courses.items()]
    assert _stars(low) == ["Max-Common"]
    assert _mean(low, "Max-Common")["speed"] == 1.5


@pytest.mark.parametrize(
    ("changes", "stated"),
    [
        ({"partition": "Shards"}, "partition Shards"),
        ({"counts": 6}, "clients 24"),
        ({"versions": (16, 19), "counts": 4}, "versions 16 19"),
        ({"counts": (10, 2, 2, 2)}, "clients 16, shares 5:1:1:1"),
        ({"batch_size": 32}, "batch_size 32"),
        ({"options": {"max_common_layers": 4}}, "max_common_layers 4"),
        ({"options": {"share_classifier": True}}, "share_classifier true"),
        ({"course": (0.5, 0.5, 0.5)}, "rounds 3"),
    ],
)
def test_what_a_setting_differs_in_is_reported(
    tmp_path: Path, changes: dict[str, Any], stated: str
) -> None:
    usual = [strategy_run(tmp_path, name, FLAT) for name in ("Standalone", "MaxCommon")]
    other = strategy_run(tmp_path, "MaxCommon", **{"course": FLAT, "name": "other", **changes})
    found = _names([other, *usual])
    assert list(found.items()) == [("", ["Standalone", "Max-Common"]), (stated, ["Max-Common"])]


def test_order_of_client_groups_and_seeds_are_no_settings(tmp_path: Path) -> None:
    up: dict[str, Any] = {"setting": "layers", "family": "VDCNN", "partition": "Shards"}
    runs = [
        strategy_run(tmp_path, name, FLAT, versions=versions, counts=counts, seed=seed, **up)
        for seed, (name, versions, counts) in enumerate(
            (("ClusteredFL", (9, 17), (6, 2)), ("MaxCommon", (17, 9), (2, 6)))
        )
    ]
    assert _names(runs) == {"": ["Clustered-FL", "Max-Common"]}
    assert strategy_table(runs)["model"].tolist() == ["9", "17", ""] * 2


def test_an_experiment_that_differs_in_what_has_no_name_is_a_setting_by_its_name(
    tmp_path: Path,
) -> None:
    runs = [strategy_run(tmp_path, name, FLAT) for name in ("ClusteredFL", "MaxCommon")]
    config = (runs[1].folder / "config.yaml").read_text().replace("- personal", "- all")
    other = strategy_run(tmp_path, "MaxCommon", FLAT, name="b", config=config)
    assert _names([*runs, other]) == {"": ["Clustered-FL", "Max-Common"], "b-s0": ["Max-Common"]}
    assert _mean([*runs, other], "Max-Common", setting="b-s0")["speed"] == 1


def test_standalone_shares_the_setting_whatever_start_the_others_have(tmp_path: Path) -> None:
    stated: dict[str, Any] = {"options": {"initial": "group"}}
    runs = [strategy_run(tmp_path, "Standalone", FLAT)]
    runs += [strategy_run(tmp_path, n, FLAT, **stated) for n in ("BasicCommon", "MaxCommon")]
    assert _names(runs) == {"": ["Standalone", "Basic-Common", "Max-Common"]}


def test_a_limit_is_compared_with_clustered_fl_without_one(row: list[Run]) -> None:
    root, course = row[0].folder.parent, (0.1, 0.8, 0.8, 0.8)
    options = {"max_common_layers": 2}
    runs = [
        *row,
        strategy_run(root, "MaxCommon", course, name="l2", options=options),
        strategy_run(root, "MaxCommon", course, name="s", partition="Shards"),
    ]
    assert _mean(runs, "Max-Common", setting="max_common_layers 2")["speed"] == 2
    assert np.isnan(_mean(runs, "Max-Common", setting="partition Shards")["target"])


def test_one_family_has_one_row_of_versions_over_all_data(tmp_path: Path) -> None:
    runs = [
        strategy_run(tmp_path, "MaxCommon", FLAT, data=data, name=data, versions=versions)
        for data, versions in (("CIFAR10", (11, 13)), ("CINIC10", (13, 16)), ("MNIST", (16,)))
    ]
    table = strategy_table(runs)
    assert table["version"].tolist() == ["V1", "V2", "mean", "V2", "V3", "mean", "V3", "mean"]
    assert table["mean"].tolist()[-2:] == [0.5, 0.5]  # a single client group has no column


def test_what_is_no_study(tmp_path: Path) -> None:
    alone = strategy_run(tmp_path, "Standalone", FLAT)
    fedavg = strategy_run(tmp_path, "FedAvg", FLAT)
    silent = strategy_run(tmp_path, "MaxCommon", FLAT, name="silent", stated={"groups": {}})
    other = strategy_run(tmp_path, "MaxCommon", FLAT, name="no config", config=None)
    alike = strategy_run(tmp_path, "MaxCommon", FLAT, name="alike", versions=(2, 2))
    unknown = strategy_run(tmp_path, "MaxCommon", FLAT, name="unknown", setting="size")
    assert strategy_table([alone, fedavg, silent, other, alike, unknown]).empty
    third = strategy_run(tmp_path, "ClusteredFL", FLAT, data="CINIC10")
    assert set(strategy_table([alone, third])["data"]) == {"CINIC10"}


@pytest.fixture
def two(tmp_path: Path) -> list[Run]:
    """Two seeds of two strategies with two versions, a limit, and a data set with one version."""
    changes: dict[str, Any] = {"versions": (11, 13), "steps": (0.0, 0.1)}
    courses = {"ClusteredFL": (0.3, 0.5), "MaxCommon": (0.5, 0.7)}
    found = [
        strategy_run(tmp_path, name, np.add(course, 0.01 * seed), seed=seed, **changes)
        for name, course in courses.items()
        for seed in (0, 1)
    ]
    changes["options"] = {"max_common_layers": 2}
    found.append(strategy_run(tmp_path, "MaxCommon", (0.2, 0.4), name="l2", **changes))
    text: dict[str, Any] = {"data": "AGNews", "setting": "layers", "versions": (3,)}
    text["family"] = "CharCNN"
    found.append(strategy_run(tmp_path, "BasicCommon", (0.1, 0.25), name="text", **text))
    return found


def test_the_table_has_a_row_per_setting_and_strategy(two: list[Run]) -> None:
    table = shown(strategy_table(two))
    versions = ("V1", "V2", "mean")
    assert tuple(table.columns) == ("setting", "strategy", *versions, *PACE)
    half = f"{100 * 12.706204736432095 * 0.005:.2f}"  # 95 % t interval of two seeds
    first, second = (
        [f"{value} +- {half}" for value in values]
        for values in (("45.50", "55.50", "50.50"), ("*65.50", "*75.50", "*70.50"))
    )
    limited = ("35.00", "45.00", "40.00")
    assert rows_of(table) == (
        ("CIFAR10, VGG", "Clustered-FL", *first, "50.50", "2", "1.00"),
        ("CIFAR10, VGG", "Max-Common", *second, "50.50", "1", "2.00"),
        ("CIFAR10, VGG; max_common_layers 2", "Max-Common", *limited, "50.50", "-", "-"),
        ("AGNews, CharCNN", "Basic-Common", "25.00", "-", "25.00", "-", "-", "-"),
    )
    text = notes(strategy_table(two))
    assert text[1] == "V1 and so on: VGG 11, 13; CharCNN 3."
    assert text[-1].endswith("Target: what Clustered-FL reached in the end.")
    assert notes(strategy_table(two, 0.6), 0.6)[-1].endswith("Target: 0.6.")


def test_a_comparison_writes_the_table_and_removes_one_of_other_runs(
    two: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ReadPage(compare([run.folder for run in two], target=0.6))
    assert "Strategies by version" in page.texts["h2"]
    assert "V1 and so on: VGG 11, 13; CharCNN 3." in page.texts["p"]
    path = tmp_path / "comparison" / "comparison-strategies.csv"
    found = {(r["setting"], r["strategy"], r["version"]): r for r in csv.DictReader(path.open())}
    assert len(found) == 3 * 3 + 2
    mean = found["", "Max-Common", "mean"]
    names = [mean[key] for key in ("data", "family", "model", "seeds", "speed")]
    assert names == ["CIFAR10", "VGG", "", "2", ""]  # Clustered-FL ends at 0.55
    figures = [float(mean[key]) for key in ("mean", "target", "rounds", "resolution")]
    np.testing.assert_allclose(figures, [0.755 - 0.05, 0.6, 2, 1])
    second = found["max_common_layers 2", "Max-Common", "V2"]
    assert (second["model"], second["std"], second["target"]) == ("13", "", "")
    assert "Max-Common" in capsys.readouterr().out
    others = [strategy_run(tmp_path, "FedAvg", (0.5, 0.6), seed=seed) for seed in (0, 1)]
    page = ReadPage(compare([run.folder for run in others]))
    assert not path.exists()
    assert "Strategies by version" not in page.texts["h2"]
    assert "Standalone" not in capsys.readouterr().out


@pytest.mark.parametrize("target", [80.0, 0.0, -0.5, float("nan"), float("inf")])
def test_a_target_that_is_no_accuracy_is_refused(row: list[Run], target: float) -> None:
    with pytest.raises(UserError, match=r"^--target: .*; give an accuracy in 0..1, such as 0.8"):
        compare([run.folder for run in row], target=target)


def test_a_target_of_another_metric_is_any_number(tmp_path: Path) -> None:
    courses = {"ClusteredFL": (9.0, 5.0), "MaxCommon": (6.0, 3.0)}
    runs = [strategy_run(tmp_path, n, c, metric="perplexity") for n, c in courses.items()]
    with pytest.raises(UserError, match=r"^--target: inf; give a finite number"):
        compare([run.folder for run in runs], target=float("inf"))
    table = strategy_table(runs, 6.0)
    assert "Final personal perplexity:" in notes(table, 6.0)[0]
    assert shown(table)["speed"].tolist() == ["1.00", "2.00"]


def _figure(runs: list[Run], name: str, target: float | None = None) -> Figure:
    return next(f for f in figures(runs, target=target) if f.name.startswith(name))


def test_each_strategy_has_a_line_for_all_clients_and_for_each_version(row: list[Run]) -> None:
    figure = _figure(row, "strategies")
    charts = by_title(figure)
    assert list(charts) == ["all clients", "VGG 11", "VGG 13", "VGG 16", "VGG 19"]
    assert list(figure.series) == ["Standalone", "Clustered-FL", "Basic-Common", "Max-Common"]
    assert drawn(charts["all clients"])["Max-Common"][:2] == [(1, 0.5), (2, 0.8)]
    assert drawn(charts["VGG 19"])["Max-Common"][:2] == [(1, 0.515), (2, 0.815)]
    assert figure.caption.endswith("Target of the speed: 80.00 %.")
    two = [row[0], row[3]]
    assert "Target" not in _figure(two, "strategies").caption
    assert _figure(two, "strategies", 0.25).caption.endswith("Target of the speed: 25.00 %.")


def test_one_version_has_the_chart_of_all_clients_alone(tmp_path: Path) -> None:
    one: dict[str, Any] = {"versions": (16,), "counts": 8, "stated": {"synthetic": True}}
    runs = [strategy_run(tmp_path, n, COURSES[n], **one) for n in ("ClusteredFL", "MaxCommon")]
    (figure,) = figures(runs)
    assert list(by_title(figure)) == ["all clients"]
    assert figure.title.endswith("(synthetic data)")


def _factors(runs: list[Run]) -> dict[str, Chart]:
    charts = [chart for f in figures(runs) if f.name.startswith("factors") for chart in f.charts]
    return {chart.title.split(", ")[1]: chart for chart in charts}


def _max(root: Path, name: str, score: float, **changes: Any) -> Run:
    return strategy_run(root, "MaxCommon", (0.1, score), name=name, **changes)


def test_versions_clients_and_layers_have_a_chart_each(tmp_path: Path) -> None:
    runs = [
        _max(tmp_path, "n1", 0.4, versions=(11,), counts=8),
        _max(tmp_path, "n2", 0.5, versions=(11, 13), counts=4),
        _max(tmp_path, "usual", 0.7),
        _max(tmp_path, "k24", 0.8, counts=6),
        _max(tmp_path, "l6", 0.65, options={"max_common_layers": 6}),
        _max(tmp_path, "l10", 0.68, options={"max_common_layers": 10}),
        strategy_run(tmp_path, "ClusteredFL", (0.1, 0.3)),
    ]
    assert {name: drawn(chart) for name, chart in _factors(runs).items()} == {
        "N": {"Max-Common": [("1", 0.4), ("2", 0.5), ("4", 0.7)]},
        "K": {"Max-Common": [("8", 0.7), ("24", 0.8)]},
        "L": {"Max-Common": [("6", 0.65), ("10", 0.68), ("no limit", 0.7)]},
    }


def test_a_line_needs_two_values_and_is_named_by_what_else_is_special(tmp_path: Path) -> None:
    usual = [_max(tmp_path, f"k{count}", 0.7, counts=count) for count in (2, 3, 4)]
    both = _max(tmp_path, "more and smaller batches", 0.8, counts=6, batch_size=32)
    assert _factors([usual[0], both]) == {}
    three: dict[str, Any] = {"versions": (13, 16, 19), "counts": (3, 3, 2)}
    alone = [
        strategy_run(tmp_path, "Standalone", (0.1, 0.2), counts=count, name=f"s{count}")
        for count in (2, 3)
    ]
    limits = [
        _max(tmp_path, f"l{limit}", 0.6, options={"max_common_layers": limit}, **three)
        for limit in (2, 4, None)
    ]
    charts = _factors([*usual, *alone, *limits])
    assert list(drawn(charts["L"])) == ["Max-Common, versions 13 16 19"]
    assert list(drawn(charts["K"])) == ["Standalone", "Max-Common"]


def test_data_sets_settings_and_factors_have_pictures_of_their_own(
    row: list[Run], tmp_path: Path
) -> None:
    more = [
        strategy_run(tmp_path, name, COURSES[name], **changes)
        for name in ("ClusteredFL", "MaxCommon")
        for changes in (
            {"name": f"{name}-shards", "partition": "Shards"},
            {"name": f"{name}-cinic", "data": "CINIC10", "family": "CIFARResNet"},
        )
    ]
    other = strategy_run(tmp_path, "MaxCommon", COURSES["MaxCommon"], name="k24", counts=6)
    found = study_figures([*row, other, *more])
    assert {figure.name: figure.title for figure in found} == {
        "strategies-cifar10-vgg": "CIFAR10, VGG: accuracy by strategy",
        "strategies-cifar10-vgg-partition-shards": (
            "CIFAR10, VGG; partition Shards: accuracy by strategy"
        ),
        "strategies-cinic10-cifarresnet": "CINIC10, CIFARResNet: accuracy by strategy",
        "factors-cifar10-vgg": "CIFAR10, VGG: accuracy by versions, clients and common layers",
    }
