"""What is made of runs of FlexiFed's strategies: studies, settings, the best, the speed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.results.run import Run
from lightfed.studies.flexifed.strategies import Pace, Setting, Study, studies
from tests.report.make_study import strategy_run

FLAT = (0.5, 0.5)


def _study(runs: list[Run]) -> Study:
    (study,) = studies(runs)
    return study


def _names(study: Study) -> dict[str, list[str]]:
    return {setting.variant: list(setting.trials) for setting in study.settings}


@pytest.fixture
def row(tmp_path: Path) -> list[Run]:
    """One setting; the folders' order is not the paper's."""
    courses = {
        "MaxCommon": (0.5, 0.8, 0.9, 0.9),
        "BasicCommon": (0.3, 0.5, 0.5, 0.6),
        "ClusteredFL": (0.2, 0.4, 0.6, 0.8),
        "Standalone": (0.1, 0.2, 0.3, 0.4),
    }
    return [strategy_run(tmp_path, name, course) for name, course in courses.items()]


def _one(runs: list[Run]) -> Setting:
    (setting,) = _study(runs).settings
    return setting


def test_experiments_that_differ_in_the_strategy_alone_are_one_setting(row: list[Run]) -> None:
    setting = _one(row)
    assert setting.name == "CIFAR10, VGG"
    assert list(setting.trials) == ["Standalone", "Clustered-FL", "Basic-Common", "Max-Common"]
    assert setting.versions == ("11", "13", "16", "19")
    assert setting.topic.metric == "accuracy"


def test_the_speed_is_the_ratio_of_rounds_to_what_clustered_fl_reached(row: list[Run]) -> None:
    setting = _one(row)
    assert setting.target(None) == 0.8
    assert setting.pace("Max-Common", None) == Pace(rounds=2, speed=2.0)
    assert setting.pace("Clustered-FL", None) == Pace(rounds=4, speed=1.0)
    never = setting.pace("Standalone", None)
    assert math.isnan(never.rounds)
    assert math.isnan(never.speed)


def test_the_target_can_be_asked_for(row: list[Run]) -> None:
    setting = _one(row)
    assert setting.pace("Max-Common", 0.5) == Pace(rounds=1, speed=3.0)
    assert setting.pace("Basic-Common", 0.5) == Pace(rounds=2, speed=1.5)
    beyond = setting.pace("Max-Common", 0.85)
    assert beyond.rounds == 3
    assert math.isnan(beyond.speed)  # Clustered-FL did not get there


def test_without_clustered_fl_there_is_no_target_but_one_that_is_asked_for(
    row: list[Run],
) -> None:
    setting = _one([row[0], row[3]])
    assert math.isnan(setting.target(None))
    assert math.isnan(setting.pace("Max-Common", None).rounds)
    assert setting.pace("Max-Common", 0.8).rounds == 2


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
    setting = _one(runs)
    assert setting.target(None) == 0.5
    assert setting.pace("Max-Common", None) == Pace(rounds=2, speed=1.5)
    score = setting.trials["Max-Common"].score("accuracy")
    np.testing.assert_allclose(score, (0.8, np.std([0.7, 0.9], ddof=1)))


def test_a_low_perplexity_is_a_good_one(tmp_path: Path) -> None:
    courses = {"ClusteredFL": (9.0, 7.0, 5.0), "MaxCommon": (6.0, 5.0, 3.0)}
    runs = [strategy_run(tmp_path, n, c, metric="perplexity") for n, c in courses.items()]
    setting = _one(runs)
    assert setting.best(None) == {"Max-Common"}
    assert setting.pace("Max-Common", None) == Pace(rounds=2, speed=1.5)


def test_the_best_of_a_version_is_one_of_those_that_have_it(row: list[Run]) -> None:
    setting = _one(row)
    assert setting.best(None) == {"Max-Common"}
    assert setting.best("13") == {"Max-Common"}
    assert setting.best("12") == set()
    assert _one(row[:1]).best(None) == set()  # alone, it is no better than others


def test_two_strategies_may_be_the_best(tmp_path: Path) -> None:
    runs = [strategy_run(tmp_path, name, FLAT) for name in ("ClusteredFL", "MaxCommon")]
    assert _one(runs).best("19") == {"Clustered-FL", "Max-Common"}


@pytest.mark.parametrize(
    ("changes", "stated"),
    [
        ({"partition": "Shards"}, "partition Shards"),
        ({"counts": 6}, "clients 24"),
        ({"versions": (16, 19), "counts": 4}, "versions 16 19"),
        ({"counts": (5, 1, 1, 1)}, "shares 5:1:1:1"),
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
    found = _names(_study([other, *usual]))
    assert list(found.items()) == [("", ["Standalone", "Max-Common"]), (stated, ["Max-Common"])]


def test_a_limit_is_reported_even_where_all_have_it(tmp_path: Path) -> None:
    run = strategy_run(tmp_path, "MaxCommon", FLAT, options={"max_common_layers": 2})
    assert list(_names(_study([run]))) == ["max_common_layers 2"]


def test_the_order_of_the_client_groups_is_no_setting(tmp_path: Path) -> None:
    up: dict[str, Any] = {"setting": "layers", "family": "VDCNN", "partition": "Shards"}
    runs = [
        strategy_run(tmp_path, name, FLAT, versions=versions, counts=counts, **up)
        for name, versions, counts in (
            ("ClusteredFL", (9, 17), (6, 2)),
            ("MaxCommon", (17, 9), (2, 6)),
        )
    ]
    assert _names(_study(runs)) == {"": ["Clustered-FL", "Max-Common"]}
    trial = _study(runs).trials[1]
    assert (trial.options["versions"], trial.options["shares"]) == ("9 17", "3:1")


def test_strategies_of_other_seeds_are_one_setting(tmp_path: Path) -> None:
    runs = [
        strategy_run(tmp_path, name, FLAT, seed=seed)
        for seed, name in enumerate(("ClusteredFL", "MaxCommon"))
    ]
    assert _names(_study(runs)) == {"": ["Clustered-FL", "Max-Common"]}


def test_clients_that_cannot_be_divided_are_even(tmp_path: Path) -> None:
    run = strategy_run(tmp_path, "MaxCommon", FLAT, versions=(11, 13, 16), counts=(3, 3, 2))
    assert _study([run]).trials[0].options["shares"] == "even"


def test_where_a_run_was_made_is_no_setting(tmp_path: Path) -> None:
    runs = [strategy_run(tmp_path, name, FLAT) for name in ("ClusteredFL", "MaxCommon")]
    text = (runs[1].folder / "config.yaml").read_text()
    elsewhere = text
    changes = {"devices: 1": "devices: 4", "device\n": "host\n", "256": "64", "- personal": "- all"}
    for here, there in changes.items():
        assert here in text
        elsewhere = elsewhere.replace(here, there)
    other = strategy_run(tmp_path, "MaxCommon", FLAT, name="b", config=elsewhere)
    assert _names(_study(runs)) == {"": ["Clustered-FL", "Max-Common"]}
    twice = _study([*runs, other])
    assert _names(twice) == {"": ["Clustered-FL", "Max-Common"], "#2": ["Max-Common"]}
    assert twice.settings[1].baseline is not None  # the options are the same


@pytest.mark.parametrize("start", ["own", "group"])
def test_standalone_shares_the_setting_whatever_start_the_others_have(
    tmp_path: Path, start: str
) -> None:
    stated: dict[str, Any] = {"options": {"initial": start}}
    runs = [strategy_run(tmp_path, "Standalone", FLAT)]
    runs += [strategy_run(tmp_path, n, FLAT, **stated) for n in ("BasicCommon", "MaxCommon")]
    assert _names(_study(runs)) == {"": ["Standalone", "Basic-Common", "Max-Common"]}


def test_a_limit_is_held_against_clustered_fl_without_one(row: list[Run]) -> None:
    root = row[0].folder.parent
    options = {"max_common_layers": 2}
    limited = strategy_run(root, "MaxCommon", (0.1, 0.8, 0.8, 0.8), name="l2", options=options)
    shards = strategy_run(root, "MaxCommon", (0.1, 0.8, 0.8, 0.8), name="s", partition="Shards")
    found = {setting.variant: setting for setting in _study([*row, limited, shards]).settings}
    assert found["max_common_layers 2"].pace("Max-Common", None) == Pace(rounds=2, speed=2.0)
    assert math.isnan(found["partition Shards"].target(None))


def test_an_experiment_of_two_lists_counts_each_seed_once(tmp_path: Path) -> None:
    runs = [
        strategy_run(tmp_path, "MaxCommon", (0.5, score), seed=seed, name=name)
        for name, seed, score in (("table", 0, 0.5), ("table", 1, 0.7), ("versions", 1, 0.7))
    ]
    text = (runs[0].folder / "config.yaml").read_text().replace("table-s0", "stopped-s0")
    short = {"personal/accuracy": (0.1,)}
    stopped = strategy_run(tmp_path, "MaxCommon", FLAT, name="stopped", metrics=short, config=text)
    (trial,) = _study([*runs, stopped]).trials
    assert [run.name for run in trial.group.runs] == ["table-s0", "versions-s1"]
    np.testing.assert_allclose(trial.score("accuracy"), (0.6, np.std([0.5, 0.7], ddof=1)))


def test_versions_stand_in_natural_order_whatever_the_client_groups(tmp_path: Path) -> None:
    steps = (0.3, 0.0)
    run = strategy_run(
        tmp_path, "MaxCommon", FLAT, versions=(17, 9), steps=steps, setting="layers", family="VDCNN"
    )
    study = _study([run])
    assert study.topic.versions == ("9", "17")
    scores = [study.trials[0].score("accuracy", version)[0] for version in ("9", "17")]
    np.testing.assert_allclose(scores, (0.35, 0.65))


@pytest.mark.parametrize(("setting", "versions"), [("size", (2, 10)), ("depth", (2, 2))])
def test_client_groups_are_the_versions_where_no_setting_tells_them_apart(
    tmp_path: Path, setting: str, versions: tuple[int, ...]
) -> None:
    stated = {"groups": {"big": 2, "a small one": 2}}
    run = strategy_run(
        tmp_path, "MaxCommon", FLAT, versions=versions, setting=setting, stated=stated
    )
    assert _study([run]).topic.versions == ("a small one", "big")


def test_one_family_has_one_row_of_versions_over_all_data(tmp_path: Path) -> None:
    runs = [
        strategy_run(tmp_path, "MaxCommon", FLAT, data=data, name=data, versions=versions)
        for data, versions in (("CIFAR10", (11, 13)), ("CINIC10", (13, 16, 19)))
    ]
    found = studies(runs)
    assert {study.topic.versions for study in found} == {("11", "13", "16", "19")}
    assert [study.settings[0].versions for study in found] == [("11", "13"), ("13", "16", "19")]


def test_a_single_client_group_has_the_mean_for_its_own(tmp_path: Path) -> None:
    run = strategy_run(tmp_path, "MaxCommon", (0.25, 0.5), versions=(16,), counts=8)
    (trial,) = _study([run]).trials
    assert trial.score("accuracy", "16")[0] == 0.5
    assert math.isnan(trial.score("accuracy", "11")[0])


def test_what_is_no_study(tmp_path: Path) -> None:
    alone = strategy_run(tmp_path, "Standalone", FLAT)
    fedavg = strategy_run(tmp_path, "FedAvg", FLAT)
    silent = strategy_run(tmp_path, "MaxCommon", FLAT, name="silent", stated={"groups": None})
    other = strategy_run(tmp_path, "MaxCommon", FLAT, name="no config", config=None)
    assert studies([alone, fedavg, silent, other]) == []
    third = strategy_run(tmp_path, "ClusteredFL", FLAT, data="CINIC10")
    assert [study.topic.data for study in studies([alone, third])] == ["CINIC10"]
