"""Charts of federations of levels: what is drawn is what the run files say."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from lightfed.drawing.style import DARK, LIGHT, PALETTE, png_bytes
from lightfed.report.charts import charts
from lightfed.results.run import Run, read
from lightfed.results.settings import usual
from lightfed.studies.heterofl.dynamics import dynamic_figure
from lightfed.studies.heterofl.levels import Family, Level, families
from lightfed.studies.heterofl.sizes import combinations_figure, shares_figure
from tests.report.make_run import write_run

SIZES = {"a": 1000, "b": 400, "c": 100, "d": 30, "e": 10}


def _run(
    root: Path,
    name: str,
    clients: Mapping[str, int],
    score: float,
    *,
    seed: int = 0,
    assignment: str = "fix",
    algorithm: str = "HeteroFL",
    partition: str = "Iid",
    norm: str = "bn",
    metric: str = "accuracy",
    data: str = "Digits",
    **changes: Any,
) -> Run:
    """A run of so many clients per level, as the command line writes its files."""
    model = {
        "class_path": "lightfed.models.Conv",
        "init_args": {"hidden": [8, 16], "norm": norm, "rate": 1.0},
    }
    arguments: dict[str, Any] = {"assignment": assignment, "level_weights": None}
    if assignment == "dynamic":
        arguments["level_weights"] = [1.0] * len(clients)
    config = {
        "trainer": {"name": name, "max_epochs": 1},
        "model": {
            "algorithm": {"class_path": algorithm, "init_args": arguments},
            "clients": [
                {
                    "count": count,
                    "model": deepcopy(model),
                    "rate": None,
                    "level": level,
                    "name": None,
                }
                for level, count in clients.items()
            ],
            "seed": seed,
        },
        "data": {
            "dataset": {"class_path": f"lightfed.data.{data}"},
            "partition": {"class_path": f"lightfed.data.{partition}"},
        },
    }
    environment = {
        "name": name,
        "algorithm": algorithm,
        "dataset": data,
        "parameters": {level: SIZES[level] for level in clients},
        "seed": seed,
    }
    files = {
        "metrics": {f"global/{metric}": (score,), f"personal/{metric}": (score + 0.01,)},
        "environment": environment,
        "config": yaml.safe_dump(config, sort_keys=False),
    }
    return read(write_run(root / name, evaluations=None, counts=None, **{**files, **changes}))


def _family(runs: list[Run]) -> Family:
    (family,) = families(runs)
    return family


def _drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def _marks(axes: Axes) -> list[tuple[float, float]]:
    """The points, rounded, from small to large."""
    found = [line.get_xydata() for line in axes.get_lines() if line.get_marker() in ("o", "D")]
    return sorted(tuple(np.round(point, 6).tolist()) for data in found for point in data)


def _texts(axes: Axes) -> set[str]:
    return {text.get_text() for text in axes.texts}


@pytest.fixture
def mixed(tmp_path: Path) -> list[Run]:
    return [
        _run(tmp_path, "a", {"a": 10}, 0.9),
        _run(tmp_path, "ae", {"a": 5, "e": 5}, 0.8),
        _run(tmp_path, "a2e8", {"a": 2, "e": 8}, 0.7),
        _run(tmp_path, "e", {"e": 10}, 0.5),
    ]


def test_a_point_stands_at_the_mean_size_relative_to_the_largest(mixed: list[Run]) -> None:
    figure = _drawn(combinations_figure(_family(mixed), LIGHT))
    overall, personal = figure.axes
    assert _marks(overall) == [(0.01, 0.5), (0.505, 0.8), (1.0, 0.9)]
    assert _marks(personal) == [(0.01, 0.51), (0.505, 0.81), (1.0, 0.91)]
    assert _texts(overall) == {"a", "a-e", "e"}
    assert overall.get_title(loc="left") == "Digits, Conv: global accuracy\nIID"
    assert "(a: 1,000 parameters)" in overall.get_xlabel()


def test_unequal_shares_of_a_pair_are_a_line_from_one_level_to_the_other(
    mixed: list[Run],
) -> None:
    figure = _drawn(shares_figure(_family(mixed), LIGHT))
    line = figure.axes[0].get_lines()[0].get_xydata()
    np.testing.assert_allclose(line, [[0.01, 0.5], [0.208, 0.7], [0.505, 0.8], [1.0, 0.9]])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a-e"]
    assert shares_figure(_family([mixed[0], mixed[1], mixed[3]]), LIGHT) is None


def test_a_lonely_share_is_a_point(mixed: list[Run]) -> None:
    figure = _drawn(combinations_figure(_family([mixed[0], mixed[2]]), LIGHT))
    assert _texts(figure.axes[0]) == {"a", "a2-e8"}


@pytest.mark.parametrize(
    ("clients", "name"),
    [
        ({"a": 20, "b": 80}, "a2-b8"),
        ({"b": 80, "a": 20}, "a2-b8"),
        ({"a": 33, "b": 33, "c": 34}, "a-b-c"),
        ({"a": 1, "b": 2}, "a1-b2"),
        ({"a": 67, "b": 33}, "a67-b33"),
        ({"a": 6, "b": 3, "c": 3}, "a2-b1-c1"),
    ],
)
def test_a_combination_is_named_by_its_shares(
    tmp_path: Path, clients: dict[str, int], name: str
) -> None:
    run = _run(tmp_path, "run", clients, 0.5)
    assert _family([run]).members[0].combination == name


def test_fixed_and_dynamic_are_bars_side_by_side(tmp_path: Path) -> None:
    half = {"a": 5, "b": 5}
    runs = [
        _run(tmp_path, "fix", half, 0.75),
        _run(tmp_path, "dynamic", half, 0.5, assignment="dynamic"),
        _run(tmp_path, "fix-2", half, 0.25, partition="Shards"),
        _run(tmp_path, "dynamic-2", half, 0.125, partition="Shards", assignment="dynamic"),
        _run(tmp_path, "one way only", {"a": 5, "c": 5}, 0.9),
    ]
    figure = _drawn(dynamic_figure(_family(runs), LIGHT))
    iid, shards = figure.axes[:2]
    assert [bar.get_height() for bar in iid.patches] == [0.75, 0.5]
    assert [bar.get_height() for bar in shards.patches] == [0.25, 0.125]
    assert _texts(iid) == {"75.0", "50.0"}
    assert [label.get_text() for label in iid.get_xticklabels()] == ["a-b"]
    assert shards.get_title(loc="left").endswith("\nShards")
    assert dynamic_figure(_family([runs[0], runs[4]]), LIGHT) is None


def test_a_dynamic_run_is_hollow_and_named_once_with_its_fixed_twin(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "fix", {"a": 5, "b": 5}, 0.75),
        _run(tmp_path, "dynamic", {"a": 5, "b": 5}, 0.5, assignment="dynamic"),
        _run(tmp_path, "alone", {"a": 5, "c": 5}, 0.6, assignment="dynamic"),
    ]
    axes = _drawn(combinations_figure(_family(runs), LIGHT)).axes[0]
    assert sorted(text.get_text() for text in axes.texts) == ["a-b", "a-c"]
    hollow = [
        line for line in axes.get_lines() if line.get_markerfacecolor() == axes.get_facecolor()
    ]
    assert len(hollow) == 3  # two runs and the legend


def test_seeds_are_one_point_with_a_bar(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, f"ab-s{seed}", {"a": 5, "b": 5}, score, seed=seed)
        for seed, score in ((1, 0.5), (2, 0.7))
    ]
    family = _family(runs)
    (mixture,) = family.members
    np.testing.assert_allclose(mixture.score("global/accuracy"), (0.6, np.std([0.5, 0.7], ddof=1)))
    assert charts(runs)[0].repeated


def test_another_algorithm_and_another_option_are_reported(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "a", {"a": 10}, 0.9),
        _run(tmp_path, "ab", {"a": 5, "b": 5}, 0.9),
        _run(tmp_path, "gn", {"a": 5, "b": 5}, 0.7, norm="gn"),
        _run(tmp_path, "fedavg", {"a": 10}, 0.6, algorithm="FedAvg"),
    ]
    axes = _drawn(combinations_figure(_family(runs), LIGHT)).axes[0]
    assert _texts(axes) == {"a", "a-b", "a-b, norm gn", "FedAvg a"}


def test_perplexity_has_a_log_axis(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, name, {name: 10}, score, metric="perplexity")
        for name, score in (("a", 3.4), ("c", 6.0))
    ]
    axes = _drawn(combinations_figure(_family(runs), LIGHT)).axes[0]
    assert axes.get_yscale() == "log"
    assert "perplexity" in axes.get_title(loc="left")


def test_a_level_has_one_colour_in_all_families(tmp_path: Path) -> None:
    runs = [_run(tmp_path, name, {name: 10}, 0.5) for name in "ce"]
    axes = _drawn(combinations_figure(_family(runs), LIGHT)).axes[0]
    colours = {line.get_color() for line in axes.get_lines() if line.get_marker() == "o"}
    assert colours == {PALETTE[2], PALETTE[4]}


@pytest.mark.parametrize(
    ("rate", "name"), [(1.0, "a"), (0.5, "b"), (0.0625, "e"), (0.03125, "0.03125"), (0.3, "0.3")]
)
def test_a_rate_without_a_letter_is_its_own_name(rate: float, name: str) -> None:
    assert Level(rate, clients=1, parameters=1).name == name


def test_what_does_not_tell_two_widths_has_no_charts(mixed: list[Run], tmp_path: Path) -> None:
    assert charts([mixed[0], _run(tmp_path, "a-2", {"a": 5}, 0.5)]) == []
    silent = [_run(tmp_path, "no config", {"a": 5, "e": 5}, 0.5, config=None)]
    silent.append(_run(tmp_path, "no counts", {"a": 5, "e": 5}, 0.5, environment={"seed": 1}))
    assert charts(silent) == []


def test_data_sets_have_pictures_of_their_own(mixed: list[Run], tmp_path: Path) -> None:
    other = [_run(tmp_path, f"m{n}", {n: 10}, 0.5, data="MNIST") for n in "ab"]
    found = {chart.file for chart in charts([*mixed, *other])}
    assert {"comparison-sizes-digits-conv.png", "comparison-sizes-mnist-conv.png"} <= found


def test_all_labels_of_a_full_study_are_apart_and_inside(tmp_path: Path) -> None:
    names = ["abcde"[i : j + 1] for i in range(5) for j in range(i, 5)]
    runs = [
        _run(tmp_path, name, dict.fromkeys(name, 4), 0.9 - 0.02 * i) for i, name in enumerate(names)
    ]
    figure = _drawn(combinations_figure(_family(runs), LIGHT))
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [Bbox(text.get_window_extent().get_points()) for text in axes.texts]
        assert len(boxes) == len(names)
        frame = axes.get_window_extent()
        assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 + 1 for box in boxes)
        pairs = [(p, q) for i, p in enumerate(boxes) for q in boxes[:i]]
        assert not any(p.overlaps(q) for p, q in pairs)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_same_runs_give_the_same_bytes(mixed: list[Run], theme: Any) -> None:
    for draw in (combinations_figure, shares_figure):
        first, second = (png_bytes(_drawn(draw(_family(mixed), theme))) for _ in range(2))
        assert first == second
        assert len(first) > 10_000


def test_of_two_variants_that_are_as_frequent_both_are_reported() -> None:
    masks = [{"mask": "true"}, {"mask": "false"}]
    assert usual(masks) == {"mask": ""}
    assert usual([*masks, {}, {"mask": "true"}]) == {"mask": "true"}
    assert usual([{}, {"mask": "false"}, {}]) == {"mask": "unset"}
