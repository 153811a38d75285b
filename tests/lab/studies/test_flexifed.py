"""FlexiFed's strategies: protocols, and their courses."""

from pathlib import Path
from typing import Any

import pytest

from lightfed.lab.drawing.marks import Figure
from lightfed.lab.report.comparison import compare
from lightfed.lab.results.run import Run
from lightfed.lab.studies.figures import study_figures
from lightfed.lab.studies.flexifed import figures, protocols
from lightfed.utils.errors import UserError
from tests.lab.report.make_run import by_title, drawn
from tests.lab.studies.make_study import strategy_run

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


def _names(runs: list[Run]) -> dict[str, list[str]]:
    """The strategies of each protocol."""
    return {name: [group.label for group in own] for name, own in protocols(runs)}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"batch_size": 32}, ["batch_size 64", "batch_size 32"]),
        ({"course": (0.5, 0.5, 0.5)}, ["max_epochs 2", "max_epochs 3"]),
        ({"counts": (3, 2, 2, 1)}, ["clients 0 count 2", "clients 0 count 3"]),
    ],
)
def testprotocols_are_named_by_what_tells_them_apart(
    tmp_path: Path, changes: dict[str, Any], names: list[str]
) -> None:
    usual = [strategy_run(tmp_path, name, FLAT) for name in ("Standalone", "MaxCommon")]
    other = strategy_run(tmp_path, "MaxCommon", **{"course": FLAT, "name": "other", **changes})
    found = _names([other, *usual])
    assert {name: len(own) for name, own in found.items()} == {
        f"CIFAR10, VGG, {name}": count for name, count in zip(names, (2, 1), strict=True)
    }


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


def test_what_is_no_study(tmp_path: Path) -> None:
    alone = strategy_run(tmp_path, "Standalone", FLAT)
    fedavg = strategy_run(tmp_path, "FedAvg", FLAT)
    other = strategy_run(tmp_path, "MaxCommon", FLAT, name="no config", config=None)
    assert _names([alone, fedavg, other]) == {}
    third = strategy_run(tmp_path, "ClusteredFL", FLAT, data="CINIC10")
    assert list(_names([alone, third])) == ["CINIC10, VGG"]


def test_one_version_has_all_clients_alone(tmp_path: Path) -> None:
    one: dict[str, Any] = {"versions": (16,), "counts": 8, "stated": {"synthetic": True}}
    runs = [strategy_run(tmp_path, n, COURSES[n], **one) for n in ("ClusteredFL", "MaxCommon")]
    (figure,) = figures(runs)
    assert list(by_title(figure)) == ["All clients"]
    assert figure.title.endswith("(synthetic data)")


def test_a_target_of_another_metric_is_any_number(tmp_path: Path) -> None:
    courses = {"ClusteredFL": (9.0, 5.0), "MaxCommon": (6.0, 3.0)}
    runs = [strategy_run(tmp_path, n, c, metric="perplexity") for n, c in courses.items()]
    with pytest.raises(UserError, match=r"^--target: inf; give a finite number"):
        compare([run.folder for run in runs], target=float("inf"))


def test_each_strategy_has_a_line_for_all_clients_and_for_each_version(row: list[Run]) -> None:
    (figure,) = figures(row)
    charts = by_title(figure)
    assert list(charts) == ["All clients", "VGG-11", "VGG-13", "VGG-16", "VGG-19"]
    assert list(figure.series) == STRATEGIES
    assert drawn(charts["All clients"])["MaxCommon"][:2] == [(1, 0.5), (2, 0.8)]
    assert drawn(charts["VGG-19"])["MaxCommon"][:2] == [(1, 0.515), (2, 0.815)]
    assert figure.title == "CIFAR10, VGG: accuracy by strategy"


def testprotocols_have_figures_of_their_own(row: list[Run], tmp_path: Path) -> None:
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
