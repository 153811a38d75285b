"""FedBCD's configurations are of one protocol, and its sweep lists are complete."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.configs import test_sweeps as sweeps

FOLDER = sweeps.ROOT / "configs" / "fedbcd"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
METHODS = ["-fedavg", "-fedprox", "", "-i", "-standalone"]
RATES = ["0.005", "0.016", "0.05", "0.16", "0.5", "1.6"]
REPORTED = ["figure3", "figure4"]


def settings(config: str) -> dict[str, Any]:
    written: dict[str, Any] = yaml.safe_load((FOLDER / f"{config}.yaml").read_text())
    return written


def lines(study: str) -> list[tuple[str, dict[str, str]]]:
    """Of every line the name of its configuration, and its other arguments by their last word."""
    return [
        (config, {key.rpartition(".")[2]: value for key, value in given.items()})
        for config, given in sweeps.lines("fedbcd", study)
    ]


def searched(study: str) -> dict[str, list[str]]:
    """The rates of a search, by configuration."""
    found: dict[str, list[str]] = {}
    for config, given in lines(study):
        found.setdefault(config, []).append(given["lr"])
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_hundred_devices_of_ten_servers_are_tested_on_their_classes(config: Path) -> None:
    written = settings(config.stem)
    algorithm = written["model"]["algorithm"]["init_args"]
    assert [group["count"] for group in written["model"]["clients"]] == [100]
    assert not {"servers", "active", "steps", "unit"} & set(algorithm)  # the paper's
    alone = config.stem.endswith("-standalone")
    assert algorithm.get("gamma") == (0.0 if alone else None)
    devices = written["model"]["devices"]
    assert devices["delay"] == devices["step_delay"]
    assert written["data"]["personal_test"] == "labels"
    assert written["data"]["batch_size"] == 32
    assert written["model"]["optimizer"]["init_args"]["lr"] == 0.005
    assert written["trainer"]["max_epochs"] % written["trainer"]["check_val_every_n_epoch"] == 0


@pytest.mark.parametrize("data", ["digits", "mnist", "cifar10"])
def test_the_methods_differ_in_nothing_but_algorithm_and_optimizer(data: str) -> None:
    written = [settings(f"{data}{method}") for method in METHODS]
    for one in written:
        del one["model"]["algorithm"], one["model"]["optimizer"]
    assert all(one == written[0] for one in written)


def test_a_rate_is_searched_alike_for_every_method_on_seeds_that_are_not_reported() -> None:
    """Four rates for all, and larger ones as long as the largest is the best."""
    found = searched("figure-rates")
    assert list(found) == [f"{name}{method}" for name in ("mnist", "cifar10") for method in METHODS]
    assert all(len(rates) >= 4 and rates == RATES[: len(rates)] for rates in found.values())
    reported = {g.get("seed", "0") for name in REPORTED for _, g in lines(name)}
    seeds = {given["seed"] for _, given in lines("figure-rates")}
    assert seeds
    assert not seeds & reported


def test_the_last_round_is_measured() -> None:
    for config, given in lines("figure4"):
        trainer = settings(config)["trainer"] | {k: int(v) for k, v in given.items() if v.isdigit()}
        assert trainer["max_epochs"] % trainer["check_val_every_n_epoch"] == 0
