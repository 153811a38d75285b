"""The settings of an experiment, and in which of them experiments differ."""

import re

from lightfed.results.groups import options, told_apart


def test_options_leave_out_what_they_are_asked_to() -> None:
    keys = ("data.batch_size", "data.pool")
    found = options(dict.fromkeys(keys, "1"), but=re.compile(r"data\.batch"))
    assert found == {"pool": "1"}


def test_an_option_has_a_short_name_and_a_class_its_last_one() -> None:
    found = {"data.partition.class_path": "lightfed.Iid", "data.batch_size": "8"}
    assert options(found) == {"partition": "Iid", "batch_size": "8"}
    inner = {"model.clients.0.model.init_args.width": "4", "model.optimizer.init_args.lr": "1"}
    assert options(inner) == {"clients 0 model width": "4", "lr": "1"}
    unspoken = re.compile(r"^model\.clients\.0\.model\.")
    assert options(inner, unspoken=unspoken) == {"width": "4", "lr": "1"}


def test_options_that_would_share_a_name_have_longer_ones() -> None:
    keys = ("model.algorithm.init_args.lr", "model.optimizer.init_args.lr", "data.batch_size")
    found = options(dict(zip(keys, "123", strict=True)))
    assert found == {"algorithm lr": "1", "optimizer lr": "2", "batch_size": "3"}


def test_settings_are_told_apart_by_the_first_that_do() -> None:
    settings = [{"lr": "1", "mu": "1"}, {"lr": "2", "mu": "2"}, {"lr": "2", "mu": "2"}]
    assert told_apart(settings) == ["lr 1", "lr 2", "lr 2"]
    assert told_apart([{"partition": "Iid"}, {"partition": "Classes"}]) == ["Iid", "Classes"]
    assert told_apart(settings[1:]) == ["", ""]


def test_the_extent_of_a_run_and_what_readers_know_tell_nothing_apart_that_others_do() -> None:
    settings = [
        {"max_epochs": "20", "mu": "1", "condition": "a"},
        {"max_epochs": "40", "mu": "2", "condition": "a"},
        {"max_epochs": "40", "mu": "1", "condition": "b"},
    ]
    assert told_apart(settings, known="condition") == ["mu 1", "mu 2", "mu 1"]
    assert told_apart([settings[0], settings[0] | {"max_epochs": "40"}]) == [
        "max_epochs 20",
        "max_epochs 40",
    ]
