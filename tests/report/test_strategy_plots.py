"""The pictures of FlexiFed's strategies: what is drawn is what the run files say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.drawing.charts import Chart, Figure
from lightfed.results.run import Run
from lightfed.studies.figures import study_figures
from lightfed.studies.flexifed.strategies import Setting, Study, studies
from lightfed.studies.flexifed.strategy_figures import courses_figure, factors_figure
from tests.report.make_run import by_title, drawn
from tests.report.make_study import strategy_run

COURSES = {
    "Standalone": (0.1, 0.2, 0.3),
    "ClusteredFL": (0.3, 0.4, 0.6),
    "MaxCommon": (0.5, 0.6, 0.8),
}


@pytest.fixture
def row(tmp_path: Path) -> list[Run]:
    return [strategy_run(tmp_path, name, course) for name, course in COURSES.items()]


def _study(runs: list[Run]) -> Study:
    (study,) = studies(runs)
    return study


def _setting(runs: list[Run]) -> Setting:
    (setting,) = _study(runs).settings
    return setting


def _courses(runs: list[Run], asked: float | None = None) -> Figure:
    figure = courses_figure(_setting(runs), asked)
    assert figure is not None
    return figure


def test_each_strategy_has_a_line_for_all_clients_and_for_each_version(row: list[Run]) -> None:
    figure = _courses(row)
    charts = by_title(figure)
    assert list(charts) == ["all clients", "VGG 11", "VGG 13", "VGG 16", "VGG 19"]
    assert list(figure.series) == ["Standalone", "Clustered-FL", "Max-Common"]
    assert drawn(charts["all clients"])["Max-Common"] == [(1, 0.5), (2, 0.6), (3, 0.8)]
    assert drawn(charts["VGG 19"])["Max-Common"] == [(1, 0.515), (2, 0.615), (3, 0.815)]
    assert figure.caption.endswith("Target of the speed: 60.00 %.")


def test_a_target_that_is_asked_for_is_stated(row: list[Run]) -> None:
    assert "Target" not in _courses([row[0], row[2]]).caption
    assert _courses([row[0], row[2]], 0.25).caption.endswith("Target of the speed: 25.00 %.")


def test_one_strategy_or_one_round_has_no_picture_of_courses(
    row: list[Run], tmp_path: Path
) -> None:
    assert courses_figure(_setting(row[2:]), None) is None
    short = [strategy_run(tmp_path / "short", name, (0.5,)) for name in COURSES]
    assert courses_figure(_setting(short), None) is None


def test_one_version_has_the_chart_of_all_clients_alone(tmp_path: Path) -> None:
    one: dict[str, Any] = {"versions": (16,), "counts": 8, "stated": {"synthetic": True}}
    runs = [strategy_run(tmp_path, n, COURSES[n], **one) for n in ("ClusteredFL", "MaxCommon")]
    figure = _courses(runs)
    assert list(by_title(figure)) == ["all clients"]
    assert figure.title.endswith("(synthetic data)")


def _factors(runs: list[Run]) -> dict[str, Chart]:
    figure = factors_figure(_study(runs))
    assert figure is not None
    return {chart.title.split(", ")[1]: chart for chart in figure.charts}


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


def test_a_chart_needs_two_values_and_all_else_alike(row: list[Run], tmp_path: Path) -> None:
    assert factors_figure(_study(row)) is None
    both = _max(tmp_path, "more and smaller batches", 0.8, counts=6, batch_size=32)
    assert factors_figure(_study([*row, both])) is None
    course = COURSES["MaxCommon"]
    more = strategy_run(tmp_path, "MaxCommon", course, name="k24", counts=6)
    assert list(_factors([*row, both, more])) == ["K"]


def test_a_line_is_named_by_what_else_is_special(tmp_path: Path) -> None:
    three: dict[str, Any] = {"versions": (13, 16, 19), "counts": (3, 3, 2)}
    runs = [
        *(_max(tmp_path, f"k{count}", 0.7, counts=count) for count in (2, 3, 4)),
        *(
            strategy_run(tmp_path, "Standalone", (0.1, 0.2), counts=count, name=f"s{count}")
            for count in (2, 3)
        ),
        *(
            _max(tmp_path, f"l{limit}", 0.6, options={"max_common_layers": limit}, **three)
            for limit in (2, 4, None)
        ),
    ]
    charts = _factors(runs)
    assert list(drawn(charts["L"])) == ["Max-Common, versions 13 16 19"]
    assert list(drawn(charts["K"])) == ["Standalone", "Max-Common"]


def test_seeds_of_an_experiment_are_a_point_with_an_interval(tmp_path: Path) -> None:
    runs = [
        _max(tmp_path, name, score, seed=seed, counts=counts)
        for name, counts in (("k8", 2), ("k24", 6))
        for seed, score in ((0, 0.49), (1, 0.51))
    ]
    data = _factors(runs)["K"].data
    np.testing.assert_allclose(data["y"], [0.5, 0.5])
    np.testing.assert_allclose(data["high"] - data["low"], 2 * 12.706204736432095 * 0.01)


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
