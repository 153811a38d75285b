"""The pictures of FlexiFed's strategies: what is drawn is what the run files say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightfed.drawing.style import DARK, LIGHT, png_bytes
from lightfed.report.charts import charts
from lightfed.results.run import Run
from lightfed.studies.flexifed.strategies import Setting, Study, studies
from lightfed.studies.flexifed.strategy_plots import COLOURS, courses_figure, factors_figure
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


def _drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def _lines(axes: Axes) -> dict[str, list[list[float]]]:
    """Points of each line that the legend names."""
    return {
        str(line.get_label()): np.round(np.asarray(line.get_xydata()), 6).tolist()
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def test_each_strategy_has_a_line_for_all_clients_and_for_each_version(row: list[Run]) -> None:
    figure = _drawn(courses_figure(_setting(row), None, LIGHT))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["all clients", "VGG 11", "VGG 13", "VGG 16", "VGG 19"]
    every, *_, last = (_lines(axes) for axes in figure.axes)
    assert every.pop("target") == [[0, 0.6], [1, 0.6]]
    assert list(every) == ["Standalone", "Clustered-FL", "Max-Common"]
    assert every["Max-Common"] == [[1, 0.5], [2, 0.6], [3, 0.8]]
    np.testing.assert_allclose(last["Max-Common"], [[1, 0.515], [2, 0.615], [3, 0.815]])
    assert "target" not in last
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*every, "target"]


def test_a_strategy_has_one_colour_in_all_pictures(row: list[Run]) -> None:
    for runs in (row, row[1:]):
        axes = _drawn(courses_figure(_setting(runs), None, LIGHT)).axes[0]
        colours = {str(line.get_label()): line.get_color() for line in axes.get_lines()}
        assert colours["Max-Common"] == COLOURS["Max-Common"]
    assert len(set(COLOURS.values())) == 5


def test_seeds_are_a_mean_and_a_band(tmp_path: Path) -> None:
    runs = [
        strategy_run(tmp_path, name, np.add(COURSES[name], 0.1 * seed), seed=seed)
        for name in ("ClusteredFL", "MaxCommon")
        for seed in (0, 1)
    ]
    axes = _drawn(courses_figure(_setting(runs), None, LIGHT)).axes[0]
    np.testing.assert_allclose(_lines(axes)["Max-Common"], [[1, 0.55], [2, 0.65], [3, 0.85]])
    band = np.asarray(axes.collections[1].get_paths()[0].vertices)
    np.testing.assert_allclose(band[:, 1].max(), 0.85 + np.std([0, 0.1], ddof=1))
    assert charts(runs)[0].repeated


def test_one_strategy_or_one_round_has_no_picture_of_courses(
    row: list[Run], tmp_path: Path
) -> None:
    assert courses_figure(_setting(row[2:]), None, LIGHT) is None
    short = [strategy_run(tmp_path / "short", name, (0.5,)) for name in COURSES]
    assert courses_figure(_setting(short), None, LIGHT) is None


def test_one_version_has_the_panel_of_all_clients_alone(tmp_path: Path) -> None:
    one: dict[str, Any] = {"versions": (16,), "counts": 8, "stated": {"synthetic": True}}
    runs = [strategy_run(tmp_path, n, COURSES[n], **one) for n in ("ClusteredFL", "MaxCommon")]
    figure = _drawn(courses_figure(_setting(runs), None, LIGHT))
    assert len(figure.axes) == 1
    assert figure.get_suptitle().endswith("(synthetic data)")


def _panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_xlabel().split(", ")[1]: axes for axes in figure.axes}


def _ticks(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def _max(root: Path, name: str, score: float, **changes: Any) -> Run:
    return strategy_run(root, "MaxCommon", (0.1, score), name=name, **changes)


def test_versions_clients_and_layers_have_a_panel_each(tmp_path: Path) -> None:
    runs = [
        _max(tmp_path, "n1", 0.4, versions=(11,), counts=8),
        _max(tmp_path, "n2", 0.5, versions=(11, 13), counts=4),
        _max(tmp_path, "usual", 0.7),
        _max(tmp_path, "k24", 0.8, counts=6),
        _max(tmp_path, "l6", 0.65, options={"max_common_layers": 6}),
        _max(tmp_path, "l10", 0.68, options={"max_common_layers": 10}),
        strategy_run(tmp_path, "ClusteredFL", (0.1, 0.3)),
    ]
    panels = _panels(_drawn(factors_figure(_study(runs), LIGHT)))
    found = {name: (_ticks(axes), _lines(axes)["Max-Common"]) for name, axes in panels.items()}
    assert found == {
        "N": (["1", "2", "4"], [[0, 0.4], [1, 0.5], [2, 0.7]]),
        "K": (["8", "24"], [[0, 0.7], [1, 0.8]]),
        "L": (["6", "10", "no limit"], [[0, 0.65], [1, 0.68], [2, 0.7]]),
    }
    assert all(list(_lines(axes)) == ["Max-Common"] for axes in panels.values())


def test_a_panel_needs_two_values_and_all_else_alike(row: list[Run], tmp_path: Path) -> None:
    assert factors_figure(_study(row), LIGHT) is None
    both = _max(tmp_path, "more and smaller batches", 0.8, counts=6, batch_size=32)
    assert factors_figure(_study([*row, both]), LIGHT) is None
    course = COURSES["MaxCommon"]
    more = strategy_run(tmp_path, "MaxCommon", course, name="k24", counts=6)
    assert list(_panels(_drawn(factors_figure(_study([*row, both, more]), LIGHT)))) == ["K"]


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
    panels = _panels(_drawn(factors_figure(_study(runs), LIGHT)))
    assert list(_lines(panels["L"])) == ["Max-Common, versions 13 16 19"]
    assert list(_lines(panels["K"])) == ["Standalone", "Max-Common"]


def test_experiments_at_one_value_are_points_of_one_line(tmp_path: Path) -> None:
    runs = [
        _max(tmp_path, "11", 0.4, versions=(11,), counts=8),
        _max(tmp_path, "19", 0.6, versions=(19,), counts=8),
        _max(tmp_path, "all", 0.7),
    ]
    axes = _panels(_drawn(factors_figure(_study(runs), LIGHT)))["N"]
    assert _lines(axes)["Max-Common"] == [[0, 0.5], [1, 0.7]]
    marks = [line for line in axes.get_lines() if line.get_marker() == "o"]
    points = sorted(np.concatenate([np.asarray(line.get_xydata()) for line in marks]).tolist())
    np.testing.assert_allclose(points, [[0, 0.4], [0, 0.6], [1, 0.7]])


def test_seeds_of_an_experiment_are_a_point_with_a_bar(tmp_path: Path) -> None:
    runs = [
        _max(tmp_path, name, score, seed=seed, counts=counts)
        for name, counts in (("k8", 2), ("k24", 6))
        for seed, score in ((0, 0.5), (1, 0.7))
    ]
    axes = _panels(_drawn(factors_figure(_study(runs), LIGHT)))["K"]
    np.testing.assert_allclose(_lines(axes)["Max-Common"], [[0, 0.6], [1, 0.6]])
    (bars,) = axes.collections
    ends = np.array([path.vertices for path in bars.get_paths()])
    np.testing.assert_allclose(np.ptp(ends[:, :, 1], axis=1), 2 * np.std([0.5, 0.7], ddof=1))


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_same_runs_give_the_same_bytes(row: list[Run], theme: Any) -> None:
    pictures = [png_bytes(_drawn(courses_figure(_setting(row), None, theme))) for _ in range(2)]
    assert pictures[0] == pictures[1]
    assert len(pictures[0]) > 10_000
