"""Charts of federations of levels: what is drawn is what the run files say."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from lightfed.lab.drawing.marks import Figure
from lightfed.lab.results.run import Run, read
from lightfed.lab.studies.heterofl import figures
from tests.lab.report.make_run import drawn, write_run

SIZES = {"a": 1000, "b": 400, "c": 100, "d": 30, "e": 10}


def _run(
    root: Path,
    name: str,
    clients: Mapping[str, int],
    score: float,
    *,
    assignment: str = "fix",
    algorithm: str = "HeteroFL",
    partition: str = "Iid",
    norm: str = "bn",
    **changes: Any,
) -> Run:
    """A run of so many clients per level, as the command line writes its files."""
    weights = [1.0] * len(clients) if assignment == "dynamic" else None
    arguments = {"assignment": assignment, "level_weights": weights}
    model = {"class_path": "lightfed.networks.Conv", "init_args": {"norm": norm, "rate": 1.0}}
    config = {
        "model": {
            "algorithm": {"class_path": algorithm, "init_args": arguments},
            "clients": [
                {"count": count, "model": deepcopy(model), "level": level}
                for level, count in clients.items()
            ],
        },
        "data": {"partition": {"class_path": f"lightfed.data.{partition}"}},
    }
    environment = {
        "name": name,
        "algorithm": algorithm,
        "dataset": "Digits",
        "parameters": {level: SIZES[level] for level in clients},
        "groups": dict(clients),
        "seed": 0,
    }
    files = {
        "metrics": {"global/accuracy": (score,), "personal/accuracy": (score + 0.01,)},
        "environment": environment,
        "config": yaml.safe_dump(config, sort_keys=False),
    }
    return read(write_run(root / name, evaluations=None, counts=None, **{**files, **changes}))


def _figure(runs: list[Run]) -> Figure:
    (figure,) = figures(runs)
    return figure


@pytest.fixture
def mixed(tmp_path: Path) -> list[Run]:
    return [
        _run(tmp_path, "a", {"a": 10}, 0.9),
        _run(tmp_path, "ae", {"a": 5, "e": 5}, 0.8),
        _run(tmp_path, "a2e8", {"a": 2, "e": 8}, 0.7),
        _run(tmp_path, "e", {"e": 10}, 0.5),
    ]


def test_a_point_stands_at_the_mean_size_relative_to_the_largest(mixed: list[Run]) -> None:
    figure = _figure(mixed)
    overall, personal = figure.charts
    assert figure.title == "Digits, Conv: accuracy against model size"
    assert overall.title == "Global accuracy"
    assert drawn(overall) == {
        "widest level a": [(1.0, 0.9), (0.505, 0.8), (0.208, 0.7)],
        "widest level e": [(0.01, 0.5)],
    }
    assert sorted(personal.data["y"].round(6)) == [0.51, 0.71, 0.81, 0.91]
    assert overall.data["name"].tolist() == ["a", "a-e", "a2-e8", "e"]
    assert "100 %: 1,000" in overall.columns["x"].heading


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
    users = sum(clients.values())
    runs = [_run(tmp_path, "run", clients, 0.5), _run(tmp_path, "e", {"e": users}, 0.4)]
    assert _figure(runs).charts[0].data["name"].tolist() == [name, "e"]


def test_fixed_and_redrawn_levels_stand_at_one_size(tmp_path: Path) -> None:
    half = {"a": 5, "b": 5}
    runs = [
        _run(tmp_path, "a", {"a": 10}, 0.9),
        _run(tmp_path, "fix", half, 0.75),
        _run(tmp_path, "dynamic", half, 0.5, assignment="dynamic"),
    ]
    chart, _ = _figure(runs).charts
    assert drawn(chart) == {
        "assignment fix": [(1.0, 0.9), (0.7, 0.75)],
        "assignment dynamic": [(0.7, 0.5)],
    }


def test_another_algorithm_and_another_option_are_series_of_their_own(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "a", {"a": 10}, 0.9),
        _run(tmp_path, "ab", {"a": 5, "b": 5}, 0.9),
        _run(tmp_path, "gn", {"a": 5, "b": 5}, 0.7, norm="gn"),
        _run(tmp_path, "fedavg", {"a": 10}, 0.6, algorithm="FedAvg"),
    ]
    data = _figure(runs).charts[0].data
    assert data["name"].tolist() == ["a", "a-b", "a-b", "a"]
    other, usual = data["series"][2], data["series"][0]
    assert data["series"].tolist()[:3] == [usual, usual, other]
    assert ("norm gn" in other, "norm bn" in usual) == (True, True)
    assert data["series"][3] == "FedAvg"


def test_partitions_have_figures_of_their_own(mixed: list[Run], tmp_path: Path) -> None:
    more = [
        _run(tmp_path, f"shards-{level}", {level: 10}, 0.3, partition="Shards") for level in "ae"
    ]
    found = [*figures([*mixed, *more])]
    assert [figure.title.partition(":")[0] for figure in found] == [
        "Digits, Iid, Conv",
        "Digits, Shards, Conv",
    ]
    assert [len(figure.charts[0].data) for figure in found] == [4, 2]


def test_what_does_not_tell_two_widths_has_no_charts(mixed: list[Run], tmp_path: Path) -> None:
    assert [*figures([mixed[0], _run(tmp_path, "a-2", {"a": 5}, 0.5)])] == []
    silent = [_run(tmp_path, "no config", {"a": 5, "e": 5}, 0.5, config=None)]
    silent.append(_run(tmp_path, "no counts", {"a": 5, "e": 5}, 0.5, environment={"seed": 1}))
    assert [*figures(silent)] == []
