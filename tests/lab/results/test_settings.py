"""The settings of an experiment, and in which of them experiments differ."""

from lightfed.lab.results.groups import options, told_apart


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
